"""What `musespark serve` tells while it loads."""

from musespark.cli.serve import LoadingLines


def test_loading_is_told_every_ten_seconds_and_once_at_its_end(capsys):
    times = iter([0.0, 1.0, 9.0, 10.0, 15.0, 21.0, 22.0, 40.0])
    told = LoadingLines(clock=lambda: next(times))
    for done in (0, 1, 2, 3, 4, 8, 8):
        told(done << 30, 8 << 30)
    assert capsys.readouterr().out.splitlines() == [
        "Loaded 2.0 of 8.0 GiB (25%) ...",
        "Loaded 4.0 of 8.0 GiB (50%) ...",
        "The weights are loaded. Getting ready for requests ...",
    ]
