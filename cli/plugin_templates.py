"""The files of a new plugin package. ``@WORD@`` is filled in."""

from __future__ import annotations

from engine.cli.plugin_template_attention import ATTENTION
from engine.cli.plugin_template_connector import CONNECTOR
from engine.cli.plugin_template_frontend import FRONTEND
from engine.cli.plugin_template_grammar import GRAMMAR
from engine.cli.plugin_template_kvcache import KVCACHE
from engine.cli.plugin_template_tools import TOOLS

PYPROJECT = """
[build-system]
requires = ["setuptools>=70.1"]
build-backend = "setuptools.build_meta"

[project]
name = "@NAME@"
version = "0.1.0"
description = "A @ROLE@ for Sixhooks"
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["sixhooks"]

[project.optional-dependencies]
test = ["pytest>=8"]

[project.entry-points."@GROUP@"]
@NAME@ = "@PACKAGE@:@CLASS@"

[tool.setuptools]
packages = ["@PACKAGE@"]
"""

README = """
# @NAME@

A @ROLE@ for Sixhooks.

```sh
pip install --no-build-isolation --no-deps -e .   # from this folder
engine plugins show @NAME@
engine plugins check @NAME@                       # every rule of a @ROLE@, hostile workloads, what it costs
pytest                                            # the same rules, and your own tests
engine serve @FLAG@ @NAME@
```

Installing without build isolation takes setuptools 70.1 or newer from this environment.
"""

TESTS = '''
"""The rules of a @ROLE@, and what this one is for."""

from engine.testing import @SUITE@


class Test@CLASS@(@SUITE@):
    plugin = "@PACKAGE@:@CLASS@"
'''

SUITE = {
    "policy": "PolicySuite",
    "scheduler": "SchedulerSuite",
    "kvcache": "KVCacheSuite",
    "executor": "ExecutorSuite",
    "connector": "ConnectorSuite",
    "attention": "AttentionSuite",
    "frontend": "FrontendSuite",
    "grammar": "GrammarSuite",
    "tool_parser": "ToolParserSuite",
}

POLICY = '''
"""@NAME@: a policy. It answers any of the hooks order, admit, evict and commit; see docs of `engine.core.hookspecs`."""

from collections import Counter

from pydantic import Field

from engine.core import Policy, PluginOptions, Wait, hookimpl


class @CLASS@(Policy):
    """At most so many requests of one tenant run at once."""

    name = "@NAME@"
    requires_api = ">=1.0,<2"

    class Options(PluginOptions):
        limit: int = Field(4, ge=1, description="running requests of one tenant")

    def start(self, context):
        """Called once, before the first step."""
        self._counted = None
        self._runs = Counter()  # tenant -> requests that run

    @hookimpl
    def admit(self, step, request):
        """Object to a request while its tenant runs as many as may."""
        tenant = request.metadata.get("tenant")
        if tenant is None:
            return None
        if self._counted != (step.index, step.slots):  # counted anew when somebody started, not for each candidate
            self._counted = (step.index, step.slots)
            self._runs = Counter(other.metadata.get("tenant") for other in step.running)
        same = self._runs[tenant]
        return Wait(f"tenant {tenant} runs {same} requests") if same >= self.options.limit else None
'''

SCHEDULER = '''
"""@NAME@: a scheduler. It answers `plan` with what `step` lets it do; the core keeps every invariant."""

from pydantic import Field

from engine.core import PluginOptions, Scheduler, State, Why, hookimpl


class @CLASS@(Scheduler):
    """Running requests first, in order of admission; then the queue, from its head."""

    name = "@NAME@"
    requires_api = ">=1.0,<2"

    class Options(PluginOptions):
        chunk: int = Field(512, ge=1, description="most tokens of one request a step")

    @hookimpl
    def plan(self, step):
        """Pay the running what they owe, then start whoever fits."""
        running = list(step.running)
        first = step.grant_decodes(running)  # the fast way, as long as they owe one token
        for request in running[first:]:
            self._serve(step, request)
        if step.preempted:  # whoever gave up pages comes first: nobody is let in
            return step.seal(otherwise=Why.PREEMPTION)
        for request in step.queue():
            if not step.start(request, self._check):
                break
        return step.seal()

    def _serve(self, step, request):
        """Grant what it owes; when pages are short the request admitted last gives its up."""
        while request.state is State.RUNNING and request.debt and step.budget:
            if step.grant(request, self.options.chunk) or step.refused is not Why.PAGES:
                return
            if step.preempt(request) in (None, request):
                return

    def _check(self, room):
        """A request starts if all its known tokens fit."""
        pages = -(-(room.hit + room.owed) // room.page_size) - room.hit // room.page_size
        return min(room.owed, self.options.chunk) if pages <= room.pinned_available else Why.PAGES
'''

EXECUTOR = '''
"""@NAME@: an executor. It computes plans: for every row that samples, one token that depends on the request alone."""

from zlib import crc32

from pydantic import Field

from engine.core import Executor, ModelInfo, Outcome, PluginOptions


class @CLASS@(Executor):
    """Says a checksum of what was said before. Put a model here."""

    name = "@NAME@"
    requires_api = ">=1.0,<2"

    class Options(PluginOptions):
        vocab_size: int = Field(1000, ge=2, description="token ids are below this")

    def load(self):
        """What the core must know of the model."""
        vocab = self.options.vocab_size
        return ModelInfo(name="@NAME@", vocab_size=vocab, max_model_len=4096, fingerprint=f"@NAME@-{vocab}")

    def allocate(self, num_pages, page_size):
        """Memory for the KV of so many pages: there is none to keep here."""

    def execute(self, plan):
        """Row i computes ``counts[i]`` tokens from ``starts[i]`` on; its KV lives in the pages ``tables[i]``."""
        tokens = [
            (crc32(repr(request.tokens[: start + count]).encode()) % self.options.vocab_size,) if samples else ()
            for request, start, count, samples in zip(plan.requests, plan.starts, plan.counts, plan.samples)
        ]
        return Outcome(plan, tokens)
'''

CODE = {
    "policy": POLICY,
    "scheduler": SCHEDULER,
    "kvcache": KVCACHE,
    "executor": EXECUTOR,
    "connector": CONNECTOR,
    "attention": ATTENTION,
    "frontend": FRONTEND,
    "grammar": GRAMMAR,
    "tool_parser": TOOLS,
}
"""Role -> the package's code."""
