// Tiles of query rows: those of a sequence begin behind a place that no earlier sequence's reach.

fn start_of(entry: u32, rows: u32) -> u32 {
    return lists[params.plan.sequences + entry * SEQUENCE_WORDS + 1u] * params.group / rows + entry;
}

// The sequence whose tiles begin last at or before tile `x`; there is one.
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
