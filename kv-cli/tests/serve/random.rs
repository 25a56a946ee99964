//! Random bodies of requests: of the right shape and not, with every field, one of which may be as
//! large as a body can be.
use kv_testkit::rng::Rng;

/// Fields, and values that they may have.
const FIELDS: &[(&str, &[&str])] = &[
    ("prompt", &["\"Once\"", "[1, 403]", "[\"a\", \"b\"]", "[[1], [403]]", "\"\"", "[]", "5"]),
    (
        "messages",
        &[
            r#"[{"role": "user", "content": "Hi"}]"#,
            r#"[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]"#,
            r#"[{"role": "tool", "content": "Hi"}]"#,
            "[{}]",
        ],
    ),
    ("n", &["1", "2", "64", "65", "-1", "1.5"]),
    ("best_of", &["1", "2"]),
    ("stop", &["\"a\"", "[\"a\", \"b\"]", "[\"\"]", "5"]),
    ("seed", &["1", "-1", "1e3"]),
    ("temperature", &["0", "1", "2.0", "1e300", "-0.5"]),
    ("top_p", &["0.5", "1", "2"]),
    ("stream", &["true", "false", "0"]),
    ("stream_options", &[r#"{"include_usage": true}"#, "{}", "[]"]),
    ("model", &["\"stories260K\"", "\"another\"", "5"]),
    ("cache_salt", &["\"a\"", "\"\"", "5"]),
    ("ignore_eos", &["true", "false"]),
    ("tools", &["[]", "[{}]"]),
    ("logit_bias", &["{}", "{\"1\": 1}"]),
    ("logprobs", &["false", "1"]),
    ("response_format", &[r#"{"type": "text"}"#, r#"{"type": "json_object"}"#]),
    ("stop_token_ids", &["[]", "[5]"]),
    ("chat_template_kwargs", &["{}", "{\"a\": 1}"]),
    ("guided_json", &["null", "{}"]),
    ("user", &["\"u\"", "5"]),
    ("metadata", &["{\"a\": \"b\"}"]),
];

/// Values of any kind.
const ANY: &[&str] = &[
    "null",
    "true",
    "0",
    "-1",
    "1.5",
    "1e999",
    "18446744073709551616",
    "\"\"",
    "\"\\ud800\"",
    "[]",
    "[null]",
    "[[]]",
    "{}",
    "{\"a\": [1]}",
];

/// Entries of a long list.
const ENTRIES: &[&str] = &[
    "\"\"",
    "1",
    "0.5",
    "[]",
    "[1]",
    "\"a\"",
    "{}",
    "null",
    "[[1]]",
    "\"\\u00e9\"",
    "[\"\"]",
    r#"{"role":"user","content":""}"#,
    r#"{"role":"user","content":"a"}"#,
    r#"{"type":"text","text":""}"#,
];

/// Pieces of a long text.
const LETTERS: &[&str] =
    &["a", " ", "\u{e9}", "\\u0061", "\\\"", "word ", "\\n", "</s>", "\u{1f389}"];

/// Makes a body of at most about this many bytes.
pub(crate) fn body(random: &mut Rng, bytes_max: usize) -> Vec<u8> {
    // Without it a text may have hundreds of tokens.
    let mut fields = vec![("max_tokens", random.pick(&["1", "2", "1", "2", "0"]).to_owned())];
    for (name, values) in FIELDS {
        let is_prompt = matches!(*name, "prompt" | "messages");
        if random.one_in(if is_prompt { 1 } else { 5 }) {
            let values = if random.one_in(10) { ANY } else { values };
            fields.push((name, random.pick(values).to_owned()));
        }
    }
    if random.one_in(2) {
        let bytes = 16_usize << random.below(bytes_max.ilog2().saturating_sub(3));
        let at = usize::try_from(random.below(u32::MAX)).expect("small") % fields.len();
        fields[at].1 = bulk(random, bytes.min(bytes_max));
    }
    let fields: Vec<_> =
        fields.iter().map(|(name, value)| format!("\"{name}\": {value}")).collect();
    let mut body = format!("{{{}}}", fields.join(", ")).into_bytes();
    let at = usize::try_from(random.below(u32::MAX)).expect("small") % body.len();
    match random.below(12) {
        0 => body.truncate(at),
        1 => body[at] = 0xff,
        2 => body[at] = b'"',
        _ => {}
    }
    body
}

/// Makes one value of about this many bytes.
pub(crate) fn bulk(random: &mut Rng, bytes: usize) -> String {
    match random.below(6) {
        0 | 1 => list(random.pick(ENTRIES), bytes),
        2 => text(random.pick(LETTERS), bytes),
        3 => {
            let (open, inner, close) = random.pick(&[("[", "", "]"), ("{\"a\":", "0", "}")]);
            let depth = bytes / (open.len() + close.len());
            format!("{}{inner}{}", open.repeat(depth), close.repeat(depth))
        }
        4 => "7".repeat(bytes),
        _ => {
            let entry = random.pick(&["\"a\":0", "\"role\":\"user\"", "\"1\":1", "\"\":[]"]);
            let list = list(entry, bytes);
            format!("{{{}}}", &list[1..list.len() - 1])
        }
    }
}

/// Makes a list of equal entries.
pub(crate) fn list(entry: &str, bytes: usize) -> String {
    let count = (bytes / (entry.len() + 1)).max(1);
    let entries = format!("{entry},").repeat(count);
    format!("[{}]", &entries[..entries.len() - 1])
}

/// Makes a long text.
pub(crate) fn text(letter: &str, bytes: usize) -> String {
    format!("\"{}\"", letter.repeat(bytes / letter.len()))
}
