// Runs of rows of one block that are quantised in a step: src/op/tail.rs.

const CODED_RUN_WORDS: u32 = 5u;

struct CodedRun {
    entry: u32,
    // Positions of the sequence.
    begin: u32,
    end: u32,
    // Whether the run holds all rows that the block will have: then its mean is computed from them.
    is_whole: u32,
    // Tail rows of the runs before this one.
    staged: u32,
}

fn coded_run_of(index: u32) -> CodedRun {
    let at = index * CODED_RUN_WORDS;
    return CodedRun(runs[at], runs[at + 1u], runs[at + 2u], runs[at + 3u], runs[at + 4u]);
}

// Returns the word of `staged` at which a tail row begins.
fn staged_begin(p: Plane, run: CodedRun, position: u32, head: u32) -> u32 {
    return ((run.staged + position - run.begin) * p.num_kv_heads + head) * p.head_dim;
}
