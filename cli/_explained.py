"""A request's story as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def lines_of(said: Mapping[str, Any]) -> Iterator[str]:
    """What ``/debug/requests/{id}`` says of one request."""
    live, story = said["live"], said["story"]
    yield f"request {said['id']}"
    if live is not None:
        yield from _of_now(live)
    if story is not None:
        yield from _of_story(story)
    elif not said["recorded"]:
        yield "history   is not recorded (engine record on)"


def _of_now(live: Mapping[str, Any]) -> Iterator[str]:
    place = f", place {live['position']} of {live['queue']} in the queue" if live["position"] else ""
    yield f"now       {live['state']} for {live['seconds']:.3f} s{place}"
    tokens = {name: live[f"{name}_tokens"] for name in ("prompt", "output", "computed", "planned")}
    yield "tokens    " + ", ".join(f"{count} {name}" for name, count in tokens.items())
    if live["why"] is not None:
        yield f"waits for {live['why']}{_words(live['words'])}"
        yield f"unblock   {live['unblock']}"
    if live["position"]:
        estimate = live["estimated_start"]
        yield f"start     {'cannot be estimated yet' if estimate is None else f'in {estimate:.3f} s by estimate'}"


def _of_story(story: Mapping[str, Any]) -> Iterator[str]:
    tenant = f", tenant {story['tenant']}" if story["tenant"] else ""
    yield f"came      number {story['number']}, {story['prompt_tokens']} tokens, priority {story['priority']}{tenant}"
    if not story["began"]:
        yield "          (what happened first is no longer remembered)"
    for wait in story["waits"]:
        since, until = wait["seconds"]
        yield (
            f"waited    {_steps(wait['steps'])}: {wait['why']}{_words(wait['words'])}, {since:.3f} to {until:.3f} s"
            f"{_place(wait)}"
        )
    yield from _of_cache(story["cached"])
    for part in story["work"]:
        cut = f", cut by {part['cut']}" if part["cut"] else ""
        yield f"computed  {_steps(part['steps'])}: {part['tokens']} tokens from {part['from']} on{cut}"
    for one in story["preemptions"]:
        yield f"preempted step {one['step']}: {one['words'] or one['why']}, {one['lost']} tokens to compute again"
    if story["first_token"] is not None:
        yield f"token     the first after {story['first_token']:.3f} s"
    if story["finish"] is not None:
        detail = f" ({story['detail']})" if story["detail"] else ""
        output = f"{story['output_tokens']} tokens of output"
        yield f"ended     {story['finish']}{detail} after {story['ended']:.3f} s, {output}"


def _of_cache(cached: Mapping[str, Any] | None) -> Iterator[str]:
    if cached is None:
        return
    for start in cached["starts"]:
        yield f"started   step {start['step']}, {start['tokens']} tokens cached, after {start['seconds']:.3f} s"
    missing = cached["missing"]
    if missing is not None:
        first, end = missing["tokens"]
        yield f"missed    page {missing['page']} (tokens {first} to {end - 1}): {missing['words']} [{missing['why']}]"


def _steps(steps: list[int]) -> str:
    first, last = steps
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _words(words: str | None) -> str:
    return f" ({words})" if words else ""


def _place(wait: Mapping[str, Any]) -> str:
    places = [f"{place or 'beyond'} of {length}" for place, length in zip(wait["position"], wait["queue"], strict=True)]
    if not any(wait["queue"]):
        return ""
    return f", place {places[0]}" if places[0] == places[1] else f", place {places[0]}, then {places[1]}"
