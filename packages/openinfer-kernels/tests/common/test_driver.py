from openinfer_kernels.driver import wake_driver


def test_waking_a_driver_that_is_not_there_harms_nobody():
    thread = wake_driver(index=10_000)
    thread.join(30)
    assert not thread.is_alive()
