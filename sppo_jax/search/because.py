"""Every reason that a plan may give for a choice, as a sentence; whoever decides fills in the figures."""

from enum import Enum


class Because(Enum):
    """A reason, in words; one that compares seconds says in `whom` for which documents."""

    # Of any choice.
    ASKED = "the config asks for it"
    ONLY_CHOICE = "there is no other choice"
    SMALLEST = "no plan fits, and this plan is the smallest that was found"
    SLOWER = "the next best, {rival}, takes {bound}{times}x as long{whom}"
    AS_FAST = "the next best, {rival}, {verb} as fast (within 0.1%){whom}"
    FASTER_TIE = "the next best, {rival}, is only {gain:.2%} faster{whom}, which counts as a tie"
    TOO_LARGE = "{rival} might be faster{whom}, but does not fit"
    TIE = (
        "the fastest step takes {gain:.2%} less time{whom}, but steps within {tie:.1%} count as a tie, and this plan "
        "has {simpler}"
    )
    # Of the mesh and the split of a sequence.
    HEADS = "the model has {num_heads} heads and {num_kv_heads} key-value heads"
    HEADS_DIVIDE = "{num_heads} heads divide evenly over seq={seq}"
    QUERIES_ON_RING = (
        "the ring passes queries in every tick, even where keys and values are fewer bytes: the step changes by "
        "{change:+.2%}{whom}, which counts as a tie, and {fewer} tick bodies are compiled instead of {more}"
    )
    # Of documents.
    ONE_DOCUMENT = "sequences hold one document at most: {what}"
    # Of chunks.
    FEW_SHAPES = (
        "{count} tick shapes keep the compiled tick bodies within {most} times those of equal chunks, and change the "
        "step by {lost_s:+.2g} s{whom}"
    )
    # Of the schedule.
    TABLE = "{path} holds the table {name}"
    NEEDED_BY = "{settings} needs this schedule"
    ONE_GROUP = "all chunks pass one group of layers before any chunk enters the next, forward and backward"
    UNCUT = "sequences are not split into chunks"
    SEVERAL = "several sequences of a pipeline overlap, so the pipeline fills and drains once"
    ONE_BY_ONE = "one sequence at a time runs forward and backward over its chunks"
    WAVE = "{wave} sequences run as one, so the cost of chunks rises only once for {wave} sequences"
    VIRTUAL_STAGES = "a stage has {count} virtual stages"
    NO_OTHER_ORDER = "no other schedule fits"
    OTHER_ORDER = "the fastest of the other schedules, {name}, takes {times}x as long{whom}"
    NO_ONE_GROUP = "no breadth-first plan that fits takes {tie:.1%} less time{whom}"
    ONE_GROUP_LAST = "{where}, breadth-first is tried only if no other schedule fits"
    # Of what breadth-first plans hold, if they do not hold it in the usual way.
    KV = "K/V are {held}, and {instead}"
    KV_OF_PERIOD = (
        "a layer with a window has K/V of its window and a chunk, one with a state has none; those of other layers are "
        "{held}"
    )
    USUAL_SLOWER = "{usual} takes {times}x as long{whom}"
    USUAL_NOT = "no plan is as fast{whom} with {usual}"
    WAITING = "no plan fits with the waiting chunks in device memory"
    OPTIMIZER = "with parameters and moments in device memory, no plan fits or a step takes longer{whom}"
    # Of the stash and of dK and dV.
    LATE = "keeping the attention outputs of {chunks} in the remaining memory saves {gain:.1%} of the step{whom}"
    WAITS = (
        "{rival} would take {gain:.1%} less time than this plan{whom}, if no loop of attention waited for its copies "
        "to the host: these waits are {waits:.1%} of its step"
    )
    NOT_ON_HOST = "neither layer inputs nor attention outputs are offloaded"
    SHARE_ASKED = "the config asks for {share}"
    HIDDEN_SHARE = "this is the largest share whose copy at {rate_gb_s:.3g} GB/s overlaps with the chunk's own forward"
    WHOLE_SAVES = "offloading the whole stash saves device memory"
    WHOLE_WITH_REST = "a plan that offloads the rest of a layer offloads the whole stash"
    READ_BACK_SOON = (
        "the stash of {count} of {num_diagonals} forward ticks stays on the device, because the backward needs it "
        "within {ticks} ticks"
    )
    HOST_FULL = "at most {cap:g} of the stash is offloaded, because the host has {size} per device for the stash"
    SUMS = "gradients are summed over {chunks} chunks, and float32 fits"
    NO_SUMS = "float32 fits, and a single chunk needs no sums"
    NARROW = "no plan fits with float32 sums"
    # Of the paper's rules.
    PAPER = "the SPPO paper's heuristic, without its multiplexed partitioning"
    PAPER_MESH = (
        "this is the mesh and chunk count with the least (p-1+N)/N F(N), of the {count} that the paper's rules allow "
        "on {cluster}"
    )
    PAPER_CHUNKS = "the paper's chunks have 2K to 16K tokens and about equal FLOPs"
    PAPER_KEEPS = "nothing is recomputed, as in the paper"
    PAPER_RECOMPUTES = "the whole stash does not fit, so the linear parts are recomputed, unlike in the paper"
    PAPER_OTHER = "the config asks for it, or the layers of a stage allow no other place"

    def __call__(self, **values: object) -> str:
        """Returns the sentence with its figures."""
        return self.value.format(**values)


def joined(*sentences: str) -> str:
    """Returns the sentences that are there, as one reason of a plan."""
    return "; ".join(filter(None, sentences))
