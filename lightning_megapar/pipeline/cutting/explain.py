"""What is wrong with a step that cannot be cut, and what to change."""

from __future__ import annotations

_ORDER = "under pipeline_parallel_size > 1 a step must call the blocks in order, at least one of every stage"


def called_twice(stack: str) -> str:
    return (
        f"the pipelined stack {stack!r} was called 2 times in one step; under pipeline_parallel_size > 1 a step may "
        "call it once (use pipeline_parallel_size=1 for this module)"
    )


def called_late(stack: str, index: int) -> str:
    return f"block {index} of the pipelined stack {stack!r} was called after its successors, or twice; {_ORDER}"


def left_out(stack: str, index: int) -> str:
    return f"block {index} of the pipelined stack {stack!r} was not called before its successors; {_ORDER}"


def never_called(stack: str) -> str:
    return (
        f"the step never called the pipelined stack {stack!r}; under pipeline_parallel_size > 1 every step must call "
        "it once"
    )


def not_running(what: str) -> str:
    return (
        f"{what} is on another stage: under pipeline_parallel_size > 1 the stack runs only inside training_step, "
        "validation_step, test_step and predict_step (and a checkpointed region must not span several blocks)"
    )


def called_too_early(name: str, stack: str, block: int, blocks: int) -> str:
    where = f"after block {block} of {blocks} (0 to {blocks - 1})" if block >= 0 else "before the first block"
    return (
        f"module {name!r} lives on the last pipeline stage, but was called {where} of the pipelined stack {stack!r}. "
        f"Say where it is needed: pipeline_keep={{{name!r}: 'first'}} (or 'all'); if the step leaves out the blocks in "
        "between, use less stages: a step must call at least one block of every stage"
    )


def called_too_late(name: str, stage: int) -> str:
    return (
        f"module {name!r} lives on pipeline stage {stage}, but the step calls it behind a block of a later stage. Say "
        f"where it is needed: pipeline_keep={{{name!r}: 'last'}} (or 'all')"
    )


def modified(name: str) -> str:
    return (
        f"what {name!r} returned was modified in place before it could travel to the next pipeline stage; the "
        "rehearsal before the first step did not do that. Use an out-of-place operation there"
    )


def differs(step: str, error: object) -> str:
    return (
        f"{step} does not do the same each time that it is called: it was rehearsed on this very microbatch, with the "
        f"same random numbers, and called again it differs. Now: {error}. What decided lies outside of the module, "
        "whose own attributes were put back after the rehearsal: a count of calls in a closure or a global, an "
        "iterator, the time"
    )
