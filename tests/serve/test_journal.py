"""The journal of a server, as a process that starts again finds it."""

from isoloss.tools.serve.front.journal import Journal


def model(journal: Journal, id: str) -> None:
    journal.insert("models", id=id, session="s", owner="o", made=0.0, facts='{"rank": 4}')


def test_a_request_sent_twice_is_one_and_keeps_its_first_body(tmp_path):
    journal = Journal(tmp_path / "j")
    first = journal.accept("x", "o", "a", 3, "optim_step", b"one")
    again = journal.accept("x", "o", "a", 3, "optim_step", b"two")
    assert first == again
    assert journal.body(first.id) == b"one"
    assert journal.request("y") is None


def test_a_start_finds_what_the_saved_state_lacks_and_completions_without_an_answer(tmp_path):
    journal = Journal(tmp_path / "j")
    model(journal, "a")
    model(journal, "gone")
    for k in range(4):
        journal.accept(f"a{k}", "o", "a", k, "optim_step", b"%d" % k)
        journal.finish(f"a{k}", b"answer %d" % k, "text")
    journal.accept("g", "o", "gone", 0, "create_model", b"g")
    journal.update("models", {"id": "gone"}, dropped=1)
    journal.accept("s0", "o", "sampler", 1, "asample", b"s0")
    journal.accept("s1", "o", "sampler", 2, "asample", b"s1")
    journal.finish("s0", b"done", "text")
    journal.saved("a", 1, "folder")
    journal.close()

    journal = Journal(tmp_path / "j")
    assert [(entry.id, journal.body(entry.id), journal.answer(entry.id)) for entry in journal.unsaved()] == [
        ("a2", b"2", (b"answer 2", "text")),
        ("a3", b"3", (b"answer 3", "text")),
        ("s1", b"s1", None),
    ]
    assert journal.row("models", id="a")["saved_folder"] == "folder"
    assert journal.answer("a0") == (b"answer 0", "text")
    assert journal.body("a0") is None


def test_attempts_are_counted_until_there_is_an_answer(tmp_path):
    journal = Journal(tmp_path / "j")
    journal.accept("x", "o", "a", 0, "asample", b"")
    assert [journal.begin("x"), journal.begin("x")] == [1, 2]
    journal.finish("x", b"", "text")
    assert journal.begin("x") == 1
