"""Notes for Redis: in order, bounded, and none lost when a batch fails while others come."""

from builders import make_fleet_record

from router.book import Book
from router.notes import Note, NoteKind, NoteQueue

BOOK = Book(make_fleet_record())


def note(sequence: int) -> Note:
    """A release."""
    return Note(BOOK, NoteKind.RELEASE, sequence)


def sequences(queue: NoteQueue) -> list[int]:
    """All that wait, taken in batches of two."""
    taken = []
    while batch := queue.take(2):
        taken += [one.sequence for one in batch]
        queue.told()
    return taken


def test_a_batch_that_was_not_told_comes_first_again() -> None:
    """Order survives a failure during which more notes came."""
    queue = NoteQueue()
    for sequence in (1, 2, 3):
        queue.add(note(sequence))
    batch = queue.take(2)
    queue.add(note(4))
    queue.not_told(batch)

    assert sequences(queue) == [1, 2, 3, 4]


def test_what_is_being_told_still_waits() -> None:
    """The queue is empty only when Redis has taken everything."""
    queue = NoteQueue()
    queue.add(note(1))
    queue.take(2)
    assert len(queue) == 1
    queue.told()
    assert len(queue) == 0


def test_too_many_notes_give_way_to_the_newest() -> None:
    """The bound holds; who adds is told, because only the whole book can make it good."""
    queue = NoteQueue(notes_max=3)
    assert all(queue.add(note(sequence)) for sequence in (1, 2, 3))
    batch = queue.take(1)
    assert queue.add(note(4))
    assert not queue.add(note(5))
    queue.told()

    assert batch == [note(1)]
    assert sequences(queue) == [5]
