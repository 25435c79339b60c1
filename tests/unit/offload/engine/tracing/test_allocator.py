from offload.engine.tracing.tracer import LiveBytes


def test_live_bytes_are_those_of_the_tensors_that_are_there() -> None:
    memory = LiveBytes()
    first = memory.allocate(1000)
    memory.allocate(10)
    memory.free(first)
    memory.allocate(500)
    assert (memory.live_bytes, memory.peak_bytes, memory.largest_bytes) == (510, 1010, 1000)
    memory.reset_peak()
    assert memory.peak_bytes == 510
