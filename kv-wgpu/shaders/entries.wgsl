// Returns the entry that contains `row`, among `count` entries in `lists` of `stride` words each
// from word `at` on; the first word of an entry is its first row. Of several entries that begin at
// one row it returns the last, which is the one that has rows.
fn entry_of(at: u32, stride: u32, count: u32, row: u32) -> u32 {
    var low = 0u;
    var high = count;
    while high - low > 1u {
        let middle = low + (high - low) / 2u;
        if lists[at + middle * stride] <= row {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}
