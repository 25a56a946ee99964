// Attention mask: kv-core's AttentionOptions::visible.

const NO_WINDOW: u32 = 0xffffffffu;

// Mask options of attention.
struct MaskOptions {
    full: u32,         // 1 for a full mask, 0 for a causal one
    window_left: u32,  // NO_WINDOW without a window
    sink_tokens: u32,  // seen in addition to the window
    pad: u32,
}

// Keys that one query sees: 0..sink_tokens, begin..end. No bound decreases from a query to the next.
struct Visible {
    begin: u32,
    end: u32,
    sink_tokens: u32,
}

fn visible(mask: MaskOptions, s: Sequence, query: u32) -> Visible {
    // The query's position plus one; 0 if it is negative, which happens with more queries than
    // keys.
    let keys = s.kv_len + query + 1u;
    let after = select(0u, keys - s.q_len, keys > s.q_len);
    let end = select(min(after, s.kv_len), s.kv_len, mask.full != 0u);
    var begin = 0u;
    if mask.window_left != NO_WINDOW && after > 0u && after - 1u > mask.window_left {
        begin = min(after - 1u - mask.window_left, end);
    }
    return Visible(begin, end, min(mask.sink_tokens, begin));
}

fn sees(v: Visible, position: u32) -> bool {
    return position < v.sink_tokens || (position >= v.begin && position < v.end);
}
