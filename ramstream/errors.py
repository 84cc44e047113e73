"""What can go wrong, as a tree; the exit code stands on the class.

RamstreamError          1   anything below, or a fault of ours
├── PlanError           3   the request does not fit the inputs, or OUT is in the way
│   └── UsageError      2   a word of the request means nothing: a method, parameter, size, dtype or device
├── BudgetError         4   the memory budget is too small for one worker
├── CheckpointError     5   a checkpoint is unreadable or inconsistent
│   └── ContentError    5   what the weights hold cannot be merged as asked: NaN, Inf, unknown dtypes that differ
├── JournalError        6   an unfinished run of something else, or a run still going on
├── IntegrityError      7   bytes are not what they were: inputs changed, or a failed verify
└── DiskFullError       8   not enough free space, before or during the run

click's own usage errors are 2 too; Ctrl-C is 130, SIGTERM 143.
A message names the object, says what is wrong with both values, and what to do.
"""


class RamstreamError(Exception):
    """Base of every error a user can cause; `exit_code` is the process's exit status."""

    exit_code = 1


class PlanError(RamstreamError):
    """The request does not fit the inputs, or the output is in the way."""

    exit_code = 3


class UsageError(PlanError):
    """A word of the request means nothing, whatever the inputs are."""

    exit_code = 2


class BudgetError(RamstreamError):
    """Not even one worker fits the memory budget."""

    exit_code = 4


class CheckpointError(RamstreamError):
    """A checkpoint is unreadable, inconsistent, or holds values that cannot be merged."""

    exit_code = 5


class ContentError(CheckpointError):
    """What the weights hold cannot be merged as asked; the run could never finish, so its state is dropped."""


class JournalError(RamstreamError):
    """Unfinished work in the way belongs to another merge, or its lock is held."""

    exit_code = 6


class IntegrityError(RamstreamError):
    """Bytes are not what they were recorded to be."""

    exit_code = 7


class DiskFullError(RamstreamError):
    """The disk has, or had, too little free space."""

    exit_code = 8
