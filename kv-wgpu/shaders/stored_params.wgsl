// Parameters of the shaders that encode and decode rows without a plane.
struct Params {
    rows: Tensor,
    data: u32,
    row_bytes: u32,
    block_bytes: u32,
    num_entries: u32,
    total: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

// One head of a token.
struct HeadRow {
    // Its first byte in the tensor, and in the stored rows.
    plain: u32,
    stored: u32,
}

// Returns the place of row `index`, counted over tokens and their heads.
fn head_row(index: u32) -> HeadRow {
    let row = index / params.rows.heads;
    let entry = entry_of(0u, 2u, params.num_entries, row);
    let start = lists[2u * entry];
    let plain = head_begin(params.rows, entry, start, row - start, index % params.rows.heads);
    return HeadRow(plain, params.data + index * params.row_bytes);
}
