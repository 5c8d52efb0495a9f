"""A notebook's cells, one after the other. ``LLM`` has no event loop, and does not mind the one that Jupyter runs."""

# %% A model, once
from engine import LLM, SamplingParams

llm = LLM(scheduler="radix", kvcache="radix", num_pages=512)
greedy = SamplingParams(temperature=0, max_tokens=16)

# %% A batch, with a bar on standard error
prompts = ["The capital of France is", "One, two, three,"]
answers = llm.generate(prompts, greedy, progress=True)
for answer in answers:
    print(repr(answer.text), answer.finish_reason)

# %% A conversation, piece by piece
question = [{"role": "user", "content": "Name three colours."}]
for chunk in llm.stream(llm.render_chat(question), greedy):
    print(chunk.text, end="", flush=True)
print()

# %% The same again: its prefix is cached now
again = llm.chat(question, greedy)[0]
print(again.cached_tokens, "of", again.prompt_tokens, "tokens were cached")

# %% The stop button (KeyboardInterrupt) ends what runs; the next cell goes on with the same engine. At the end:
llm.close()
