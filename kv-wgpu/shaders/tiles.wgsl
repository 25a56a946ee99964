// Tiles of query rows. Those of a sequence begin past the last tile of the sequences before it.

fn start_of(entry: u32, rows: u32) -> u32 {
    return lists[params.plan.sequences + entry * SEQUENCE_WORDS + 1u] * params.group / rows + entry;
}

// Returns the sequence that owns tile `x`: the last one whose tiles begin at or before it.
fn owner_of(x: u32, rows: u32) -> u32 {
    var low = 0u;
    var high = params.plan.num_sequences;
    while high - low > 1u {
        let middle = low + (high - low) / 2u;
        if start_of(middle, rows) <= x {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}
