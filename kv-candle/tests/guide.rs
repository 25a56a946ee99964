//! The guide `docs/candle.md`: its blocks are compiled and run as doc tests, and code in its prose
//! is a part of such a block.
#![expect(clippy::panic, reason = "tests")]

const GUIDE: &str = include_str!("../../docs/candle.md");

/// Code in the prose that is not Rust of the guide.
const NO_RUST: [&str; 8] = [
    "[1, tokens]",
    "[tokens, heads, head_dim]",
    "q has shape [1, 6, 6, 48], expected [tokens, heads, head_dim]",
    "k has shape .., expected [b at least, heads, s at least, head_dim] = ..",
    "k has shape .., expected [t at least, h, d] = ..",
    "k is F16, ...: they must be of one type",
    "layer 3 was not written in this step",
    "120.00 GiB needed, 22.50 GiB available: ..",
];

/// Returns the blocks of Rust that are compiled, and the rest without blocks.
fn parts(guide: &str) -> (Vec<&str>, String) {
    let (mut blocks, mut prose) = (Vec::new(), String::new());
    for (at, part) in guide.split("```").enumerate() {
        match part.split_once('\n') {
            _ if at % 2 == 0 => prose.push_str(part),
            Some(("rust", code)) => blocks.push(code),
            Some(("toml", _)) => {}
            other => panic!("a block that no test compiles: {other:?}"),
        }
    }
    (blocks, prose)
}

/// Returns code in the prose that could be Rust and is in no block.
fn unknown(guide: &str) -> Vec<String> {
    let (blocks, prose) = parts(guide);
    // Comments are not compiled.
    let code_of = |line: &str| line.split("//").next().unwrap_or_default().to_owned();
    let blocks =
        blocks.iter().map(|block| block.lines().map(code_of).collect::<Vec<_>>().join("\n"));
    let blocks: Vec<_> = blocks.collect();
    let mut unknown = Vec::new();
    for (at, code) in prose.split('`').enumerate() {
        let looks_like_rust = code.contains(['(', ':', '[', '.', '&', '<', '=']);
        let is_file = code.contains(".rs") || code.contains(".json");
        let is_setting = code.starts_with("KV_");
        if at % 2 == 0 || !looks_like_rust || is_file || is_setting || NO_RUST.contains(&code) {
            continue;
        }
        if !blocks.iter().any(|block| block.contains(code)) {
            unknown.push(code.to_owned());
        }
    }
    unknown
}

#[test]
fn code_in_the_prose_is_part_of_a_block_that_is_compiled() {
    assert_eq!(unknown(GUIDE), Vec::<String>::new());
    let (blocks, prose) = parts(GUIDE);
    assert!(blocks.len() >= 5, "{}", blocks.len());
    assert_eq!(prose.matches('`').count() % 2, 0, "a code span that does not end");
    for code in NO_RUST {
        assert!(prose.contains(code), "{code} is in the guide no more");
    }
}

/// What the guide once had: both need an argument.
#[test]
fn code_that_does_not_compile_is_found() {
    for code in [".format(KvFormat::Int8)", "KvFormat::L4", "logits.argmax(D::Minus1).to_vec1"] {
        let text = format!("{GUIDE}\nUse `{code}` here.\n");
        assert_eq!(unknown(&text), [code]);
    }
    let only_said = "```rust\nuse a::b; // c::d\n```\n`a::b` and `c::d`\n";
    assert_eq!(unknown(only_said), ["c::d"]);
    let undone = std::panic::catch_unwind(|| unknown("```rust,ignore\nfn f(\n```\n"));
    assert!(undone.is_err());
    assert!(parts("```toml\na = 1\n```\n").0.is_empty());
}

/// A program copied from the guide has its `use` lines.
#[test]
fn every_block_says_what_it_uses() {
    for block in parts(GUIDE).0 {
        assert!(block.trim_start().starts_with("use "), "{block}");
        assert!(!block.lines().any(|line| line.starts_with("# ")), "hidden lines: {block}");
    }
    let first = parts(GUIDE).0.first().copied().unwrap().to_owned();
    for shown in ["let v = v.squeeze(0)?", "rope_thd(&k", "step.last_rows(), 1)?.squeeze(0)?"] {
        assert!(first.contains(shown), "{shown}");
    }
}
