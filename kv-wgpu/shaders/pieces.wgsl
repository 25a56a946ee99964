// Rows of one block that get codes in a step: src/op/write.rs.

const PIECE_WORDS: u32 = 5u;

struct Piece {
    entry: u32,
    // Positions of the sequence.
    begin: u32,
    end: u32,
    // Whether these are all rows there will be in the block: it gets its mean from them.
    is_whole: u32,
    // Rows that wait, of pieces before this one.
    staged: u32,
}

fn piece_of(index: u32) -> Piece {
    let at = index * PIECE_WORDS;
    return Piece(pieces[at], pieces[at + 1u], pieces[at + 2u], pieces[at + 3u], pieces[at + 4u]);
}

// The word of `staged` at which a row begins that waited.
fn staged_begin(p: Plane, piece: Piece, position: u32, head: u32) -> u32 {
    return ((piece.staged + position - piece.begin) * p.num_kv_heads + head) * p.head_dim;
}
