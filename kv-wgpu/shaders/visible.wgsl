// Who sees what: kv-core's AttentionOptions::visible.

const NO_WINDOW: u32 = 0xffffffffu;

// Options of attention.
struct Sight {
    full: u32,         // every key is seen, not only those before
    window_left: u32,  // NO_WINDOW without
    sink_tokens: u32,  // seen besides a window
    pad: u32,
}

// Keys that one query sees: 0..sink_tokens, begin..end. No bound falls from a query to the next.
struct Visible {
    begin: u32,
    end: u32,
    sink_tokens: u32,
}

fn visible(sight: Sight, s: Sequence, query: u32) -> Visible {
    // Its position plus one, 0 where it would be negative: there are more queries than keys.
    let keys = s.kv_len + query + 1u;
    let after = select(0u, keys - s.q_len, keys > s.q_len);
    let end = select(min(after, s.kv_len), s.kv_len, sight.full != 0u);
    var begin = 0u;
    if sight.window_left != NO_WINDOW && after > 0u && after - 1u > sight.window_left {
        begin = min(after - 1u - sight.window_left, end);
    }
    return Visible(begin, end, min(sight.sink_tokens, begin));
}

fn sees(v: Visible, position: u32) -> bool {
    return position < v.sink_tokens || (position >= v.begin && position < v.end);
}
