"""The built-in plugins pass the suites that third parties subclass."""

from __future__ import annotations

import tempfile
from importlib.util import find_spec

import pytest
import torch

from engine.core import Connector, TransferEvent, hookimpl
from engine.core.registry import Registry, make
from engine.testing import (
    AttentionSuite,
    ConnectorSuite,
    DoNothing,
    ExecutorSuite,
    FrontendSuite,
    GrammarSuite,
    KVCacheSuite,
    PolicySuite,
    SchedulerSuite,
    Suite,
    ToolParserSuite,
)


class TestUnified(SchedulerSuite):
    plugin = "unified"
    draft_options = {"num_spec_tokens": 3}


class TestUnifiedByPriority(SchedulerSuite):
    plugin = "vllm"
    options = {"policy": "priority", "long_prefill_token_threshold": 7, "watermark": 0.05}
    draft_options = {"num_spec_tokens": 2}
    seed = 1

    @classmethod
    def situations(cls):
        return super().situations()[1::4]


class TestRadix(SchedulerSuite):
    plugin = "radix"
    options = {"schedule_conservativeness": 0.1}


class TestPaged(KVCacheSuite):
    plugin = "paged"


class TestPagedWithoutCaching(KVCacheSuite):
    plugin = "paged"
    options = {"enable_prefix_caching": False}
    page_sizes = (4,)

    @classmethod
    def situations(cls):
        return super().situations()[::4]


class TestRadixCache(KVCacheSuite):
    plugin = "radix"


class TestDoNothing(PolicySuite):
    plugin = DoNothing


class TestSim(ExecutorSuite):
    plugin = "sim"


class TestTorch(ExecutorSuite):
    """On a small model of random weights: its rules load it a dozen times."""

    plugin = "torch"

    @classmethod
    def setup_class(cls):
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=300, num_hidden_layers=2, initializer_range=0.5, **sizes)
        cls._folder = tempfile.TemporaryDirectory()
        LlamaForCausalLM(config).save_pretrained(cls._folder.name)
        cls.use = {"model": cls._folder.name}

    @classmethod
    def teardown_class(cls):
        super().teardown_class()
        cls._folder.cleanup()


@pytest.mark.model
@pytest.mark.slow
class TestTorchWithTheDefaultModel(ExecutorSuite):
    plugin = "torch"


class Courier(Connector):
    """Carries everything by the next call."""

    name = "courier"

    def __init__(self, options=None):
        super().__init__(options)
        self.carried = []

    @hookimpl
    def transfer_kv(self, transfers):
        done, self.carried = self.carried, [TransferEvent(wish.id, "done") for wish in transfers]
        return done


class TestCourier(ConnectorSuite):
    plugin = Courier


class TestHost(ConnectorSuite):
    plugin = "host"


class TestLocal(ConnectorSuite):
    plugin = "local"
    remembers = False  # it saves for others


class TestFile(ConnectorSuite):
    plugin = "file"

    @classmethod
    def setup_class(cls):
        cls._folder = tempfile.TemporaryDirectory()
        cls.options = {"root": cls._folder.name}

    @classmethod
    def teardown_class(cls):
        cls._folder.cleanup()


class TestMulti(ConnectorSuite):
    """Over memory and files; its tiers are selected beside it."""

    plugin = "multi"

    @classmethod
    def setup_class(cls):
        cls._folder = tempfile.TemporaryDirectory()

    @classmethod
    def teardown_class(cls):
        cls._folder.cleanup()

    def core(self, connector, **more):
        tiers = [make("connector", "host"), make("connector", "file", {"root": self._folder.name})]
        return super().core(connector, connectors=[connector, *tiers], **more)


class TestMultiWriteBack(TestMulti):
    options = {"write": "write-back", "prefetch": "timeout"}


class TestTorchAttention(AttentionSuite):
    plugin = "torch"
    dtypes = ("float32", "bfloat16", "float16")


class TestCPUAttention(AttentionSuite):
    plugin = "cpu"
    dtypes = ("float32",)
    batch_invariant = True


class TestAutoAttention(AttentionSuite):
    plugin = "auto"
    dtypes = ("float32",)
    page_sizes = (4,)
    long_context = 300


class TestOpenAI(FrontendSuite):
    plugin = "openai"


@pytest.mark.skipif(not find_spec("llguidance"), reason="needs pip install 'sixhooks[grammar]'")
class TestLLGuidance(GrammarSuite):
    plugin = "llguidance"


@pytest.mark.skipif(
    not (find_spec("xgrammar") and find_spec("tvm_ffi")), reason="needs pip install 'sixhooks[xgrammar]'"
)
class TestXGrammar(GrammarSuite):
    plugin = "xgrammar"


class TestHermes(ToolParserSuite):
    plugin = "hermes"
    texts = (
        '<tool_call>\n[{"name": "a", "arguments": {"x": [1, {"y": "}"}]}}, {"name": "b", "parameters": {}}]',
        '<tool_call>{"arguments": {"x": "</tool_call>"}, "name": "late"}</tool_call>',
        '<tool_call>{"name": "quoted", "arguments": "{\\"x\\": 1}"}</tool_call>',
        '<tool_call>{"name": "open", "arguments": {"x": 1}}',
        '<tool_call>{"name": "cut", "arguments": {"x": [1',
        '<tool_call>{"name": "a", "arguments": {}} trailing </tool_call> more',
        '<tool_call>{"name": "n", "arguments": {}, "id": "7", "z": [1, 2]}</tool_call>',
        'text <tool_call>{"nom": "x"}</tool_call><tool_call>{"name": "none"}</tool_call>\n\n',
    )


class TestPythonic(ToolParserSuite):
    plugin = "pythonic"
    texts = (
        "<|python_start|>[a(x='it\\'s', y=[1, 2.5, {'k': (1, 2)}], z=None), b.c()]<|python_end|>",
        '[a(x=true, y="["), b(',
        "[a(x=1, y=foo)] rest",
        "[a(1)]",
        "[a(x=1)] [b()]",
        "[a(x=1),]",
        " [ a ( x = 1 ) ] ",
    )


LIBRARIES = ("nixl", "mooncake", "mooncake-store", "redis")
APART = {("attention", "flashinfer"), ("attention", "split"), ("attention", "triton")}  # beside tests of their own


def test_every_built_in_plugin_is_tried():
    """Policies are tried in ``policies``, what needs a library beside the tests of its own."""
    tried = {(suite.role, suite().found().cls) for suite in globals().values() if is_suite(suite)}
    tried |= {("connector", Registry().select("connector", name).cls) for name in LIBRARIES}
    tried |= {(role, Registry().select(role, name).cls) for role, name in APART}
    for line in Registry().listing():
        if (
            line.distribution == "sixhooks"
            and (line.role, line.name) != ("executor", "torch")
            and line.role != "policy"
        ):
            assert (line.role, Registry().select(line.role, line.name).cls) in tried, line


def is_suite(value):
    return isinstance(value, type) and issubclass(value, Suite) and value.plugin
