// Placement of rows: kv-core's SlotMap and PlaneLayout. A batch's sequences and block tables are in
// `lists`.

// Words of a sequence in `lists`.
const SEQUENCE_WORDS: u32 = 12u;

struct Sequence {
    q_start: u32,
    q_len: u32,
    new_start: u32,
    new_len: u32,
    kv_len: u32,
    coded: u32,
    coded_before: u32,
    sealed_index: u32,
    split_start: u32,
    num_splits: u32,
    table: u32,
}

fn sequence_of(plan: Plan, entry: u32) -> Sequence {
    let at = plan.sequences + entry * SEQUENCE_WORDS;
    return Sequence(lists[at + 1u], lists[at + 2u], lists[at + 3u], lists[at + 4u], lists[at + 5u],
                    lists[at + 6u], lists[at + 7u], lists[at + 8u], lists[at + 9u], lists[at + 10u],
                    lists[at + 11u]);
}

struct Place {
    index: u32,   // in the sequence's block table
    inside: u32,  // first slot inside the block
    wide: bool,   // stored in 16 bits among codes
}

// Places the `nth` of consecutive 16-bit rows.
fn place_wide(p: Plane, nth: u32) -> Place {
    return Place(nth / p.wide_per_block, nth % p.wide_per_block * p.wide_slots, true);
}

// Returns the slots of the full-precision prefix, with the gaps in it.
fn prefix_slots(p: Plane) -> u32 {
    if p.full_precision_prefix == 0u {
        return 0u;
    }
    let last = place_wide(p, p.full_precision_prefix - 1u);
    return last.index * p.block_size + last.inside + p.wide_slots;
}

// Places a token of the full-precision prefix, or a quantised one.
fn place_of(p: Plane, position: u32) -> Place {
    if position < p.full_precision_prefix {
        return place_wide(p, position);
    }
    let slot = prefix_slots(p) + (position - p.full_precision_prefix);
    return Place(slot / p.block_size, slot % p.block_size, false);
}

// Returns the blocks of `tokens` tokens without a tail.
fn blocks_of(p: Plane, tokens: u32) -> u32 {
    var slots = tokens;
    if p.full_precision_prefix > 0u && tokens > 0u {
        let wide = min(tokens, p.full_precision_prefix);
        let last = place_wide(p, wide - 1u);
        slots = last.index * p.block_size + last.inside + p.wide_slots + (tokens - wide);
    }
    return slots / p.block_size + select(0u, 1u, slots % p.block_size > 0u);
}

// Places a token of a sequence whose first `coded` tokens are quantised.
fn place_in(p: Plane, position: u32, coded: u32) -> Place {
    let begin = max(coded, p.full_precision_prefix);
    if p.has_tail == 0u || position < begin {
        return place_of(p, position);
    }
    var place = place_wide(p, position - begin);
    place.index += blocks_of(p, begin);
    return place;
}

// Places a token of the old tail, in a step that quantises it.
fn place_sealed(p: Plane, s: Sequence, position: u32) -> Place {
    var place = place_wide(p, position - max(s.coded_before, p.full_precision_prefix));
    place.index += s.sealed_index;
    return place;
}

// Returns the first position of the tail; `len` without one.
fn tail_begin(p: Plane, len: u32, coded: u32) -> u32 {
    return select(len, min(max(coded, p.full_precision_prefix), len), p.has_tail != 0u);
}

// Returns the first byte of a block of this segment.
fn block_begin(p: Plane, block: u32) -> u32 {
    return p.data + (block - p.first) * p.block_bytes;
}

// Returns the bytes from a block's start to a row of a head.
fn row_begin(p: Plane, place: Place, head: u32) -> u32 {
    return place.inside * p.token_stride + head * select(p.head_stride, p.wide_head_stride, place.wide);
}

fn is_here(p: Plane, block: u32) -> bool {
    return block >= p.first && block < p.end;
}
