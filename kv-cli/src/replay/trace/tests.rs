//! Valid traces, and everything else that a file may contain.
use super::*;
use crate::replay::source::tests::lines;

const LINE: &str =
    r#"{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [7, 9]}"#;
const ROW: &str = "2023-11-16 18:15:46.6805900,374,44";

fn read(text: impl Into<Vec<u8>>) -> Result<Trace, AtLine> {
    Trace::from_lines(lines(text), None, Sizes::default())
}

fn size(tokens: u32) -> Sizes {
    Sizes { block: NonZeroU32::new(tokens), id: None }
}

/// Checks that the text is refused at this line with these words.
#[track_caller]
fn refused(text: impl Into<Vec<u8>>, line: u64, words: &str) {
    let error = read(text).expect_err("no trace");
    let AtLine { line: at, error } = error;
    let cause = std::error::Error::source(&error).map(ToString::to_string);
    let message = format!("{error}: {}", cause.unwrap_or_default());
    assert!(at == line && message.contains(words), "line {at}: {message}");
}

fn mooncake(input_length: &str, hash_ids: &str) -> String {
    let lengths = format!(r#""input_length": {input_length}, "output_length": 1"#);
    format!(r#"{{"timestamp": 0, {lengths}, "hash_ids": {hash_ids}}}"#)
}

/// Returns the blocks of every request as their tokens.
fn requested(trace: &Trace) -> Vec<Vec<[u32; 3]>> {
    let mut blocks = Vec::new();
    let requests = trace.requests().iter().map(|request| {
        trace.blocks(request, &mut blocks);
        assert_eq!(blocks.len(), to_usize(request.num_blocks));
        blocks.iter().map(|block| trace.tokens(*block)).collect()
    });
    requests.collect()
}

#[test]
fn the_format_of_a_trace_is_recognised() {
    let trace = read(format!("{LINE}\n{LINE}")).expect("a trace");
    assert_eq!((trace.format, trace.block_size.get()), (Format::Mooncake, 512));
    assert_eq!((trace.total_tokens, trace.num_blocks()), (2000, 2));
    assert_eq!(requested(&trace), [[[7, 0, 0], [9, 0, 0]], [[7, 0, 0], [9, 0, 0]]]);
    let trace = read(format!("{}\n{ROW}\n{ROW}\n", csv::AZURE)).expect("a trace");
    assert_eq!((trace.format, trace.block_size.get()), (Format::Azure, 16));
    assert_eq!((trace.total_tokens, trace.num_blocks()), (748, 48));
    assert_eq!(requested(&trace)[1][0], [24, 0, 0], "every block is new");
}

#[test]
fn the_span_of_a_trace_is_that_of_its_clock() {
    let at = |line: &str, time: &str| line.replacen(": 0,", &format!(": {time},"), 1);
    let millis = |text: String| read(text).expect("a trace").span().map(|span| span.as_millis());
    assert_eq!(millis(format!("{}\n{}\n{LINE}", at(LINE, "1500"), at(LINE, "4000"))), Some(4000));
    assert_eq!(millis(format!("{LINE}\n{LINE}")), None);
    let turn = |time: &str| qwen(16, &[1]).replacen("61.114", time, 1);
    assert_eq!(millis(format!("{}\n{}", turn("61.5"), turn("63.75"))), Some(2250));
    let later = ROW.replacen("11-16", "11-17", 1);
    assert_eq!(millis(format!("{}\n{ROW}\n{later}", csv::AZURE)), Some(86_400_000));
    assert_eq!(millis(format!("{}\n5,a,1,1,2,b\n45.5,a,1,1,2,b", csv::BURST_GPT)), Some(40_500));
}

#[test]
fn arrivals_have_their_times_and_what_was_generated() {
    let arrivals = |text: String| {
        let trace = read(text).expect("a trace");
        let arrivals = trace.arrivals().iter();
        arrivals.map(|arrival| (arrival.seconds, arrival.output_tokens)).collect::<Vec<_>>()
    };
    let later = LINE.replacen(": 0,", ": 1500,", 1);
    assert_eq!(arrivals(format!("{LINE}\n{later}")), [(0.0, 5), (1.5, 5)]);
    let burst = format!("{}\n5,a,1,7,8,b\n2.5,a,1,99999999999,2,b", csv::BURST_GPT);
    assert_eq!(arrivals(burst), [(5.0, 7), (2.5, 1 << 24)], "in the file's order");
}

/// Makes a line of Qwen's trace.
fn qwen(input_length: u32, hash_ids: &[u64]) -> String {
    format!(
        r#"{{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length":
        {input_length}, "output_length": 132, "type": "text", "turn": 1, "hash_ids":
        {hash_ids:?}}}"#
    )
    .replace('\n', " ")
}

#[test]
fn an_id_of_qwen_is_sixteen_tokens() {
    let text = [qwen(33, &[7, 8, 9]), qwen(16, &[7])].join("\n");
    let trace = read(text.as_str()).expect("a trace");
    assert_eq!((trace.format, trace.block_size.get()), (Format::Qwen, 16));
    assert_eq!((trace.total_tokens, trace.num_blocks()), (49, 3));
    assert_eq!(requested(&trace), [vec![[7, 0, 0], [8, 0, 0], [9, 0, 0]], vec![[7, 0, 0]]]);
    refused(qwen(33, &[7, 8]), 1, "2 ids for 33 input tokens, 3 are needed: one for every 16");
    refused(qwen(33, &[7, 8, 9]).replace("hash_ids", "ids"), 1, "no request of a Qwen trace");
}

#[test]
fn the_tokens_of_an_id_can_be_given() {
    let with = |text: &str, block, id| {
        let sizes = Sizes { block: NonZeroU32::new(block), id: NonZeroU32::new(id) };
        Trace::from_lines(lines(text), None, sizes)
    };
    let trace = with(&mooncake("33", "[1, 2, 3]"), 0, 16).expect("ids of 16 tokens");
    assert_eq!((trace.block_size.get(), trace.num_blocks()), (16, 3));
    let trace = with(&qwen(33, &[1]), 16, 64).expect("an id of 64 tokens in blocks of 16");
    assert_eq!((trace.block_size.get(), trace.requests()[0].num_blocks), (16, 3));
    assert_eq!(with(&qwen(128, &[1, 2]), 128, 64).expect("joined").num_blocks(), 1);
    let AtLine { error, .. } = with(&mooncake("33", "[1]"), 0, 16).expect_err("too few");
    assert!(error.to_string().contains("one for every 16 begun"), "{error}");
    let AtLine { error, .. } = with(&mooncake("33", "[1]"), 48, 64).expect_err("no size");
    assert!(error.to_string().contains("an id stands for 64 tokens"), "{error}");
    let AtLine { error, .. } = with(&format!("{}\n{ROW}", csv::AZURE), 0, 16).expect_err("no ids");
    assert!(error.to_string().contains("a trace of Azure has no ids"), "{error}");
}

#[test]
fn a_burst_gpt_trace_has_lengths_alone() {
    let text = format!("{}\n5,ChatGPT,472,18,490,Conversation log\n", csv::BURST_GPT);
    let trace = read(text).expect("a trace");
    assert_eq!((trace.format, trace.block_size.get()), (Format::BurstGpt, 16));
    assert_eq!((trace.total_tokens, trace.num_blocks()), (472, 30));
    refused(csv::BURST_GPT, 1, "the trace is empty");
    refused("version https://git-lfs.github.com/spec/v1\noid sha256:1\n", 1, "Git LFS");
}

#[test]
fn harmless_differences_change_nothing() {
    let odd = format!("\u{feff}{LINE}\r\n\r\n   \n{LINE}\r\n\n");
    assert_eq!(requested(&read(odd).expect("a trace")).len(), 2);
    let odd = format!("\u{feff}\n{}\r\n\r\n{ROW}\r\n", csv::AZURE);
    assert_eq!(read(odd).expect("a trace").total_tokens, 374);
    let more = LINE.replace('}', r#", "chat_id": 3}"#);
    assert_eq!(read(more).expect("a trace").total_tokens, 1000);
    let nothing = read(format!("{LINE}\n{}", mooncake("0", "[]"))).expect("a trace");
    assert_eq!(requested(&nothing)[1].len(), 0);
}

#[test]
fn an_id_is_split_or_joined() {
    let text = mooncake("2100", "[1, 2, 4294967296, 4, 5]");
    let with = |tokens| Trace::from_lines(lines(text.as_str()), None, size(tokens));
    let split = with(256).expect("a trace");
    let expected = [
        [[1, 0, 0], [1, 0, 1], [2, 0, 0], [2, 0, 1], [0, 1, 0]],
        [[0, 1, 1], [4, 0, 0], [4, 0, 1], [5, 0, 0], [0; 3]],
    ];
    assert_eq!(requested(&split)[0], expected.as_flattened()[..9]);
    let joined = with(1024).expect("a trace");
    assert_eq!(requested(&joined)[0], [[2, 0, 0], [4, 0, 0], [5, 0, 0]]);
    for tokens in [3, 500, 513, 768, 1000] {
        let AtLine { line, error } = with(tokens).expect_err("no size");
        assert!(error.to_string().starts_with(&format!("--block-size {tokens}: ")), "{error}");
        assert_eq!(line, 1);
    }
}

#[test]
fn an_id_after_other_ids_is_another_content() {
    let contents = |requests: &[&str]| {
        let text: Vec<_> = requests.iter().map(|ids| mooncake("1024", ids)).collect();
        let trace = Trace::from_lines(lines(text.join("\n")), None, size(256)).expect("a trace");
        (trace.num_blocks(), trace.contents_max())
    };
    assert_eq!(contents(&["[1, 2]", "[1, 3]", "[1, 2]"]), (6, 6));
    assert_eq!(contents(&["[1, 2]", "[3, 2]"]), (6, 8));
    assert_eq!(contents(&["[1, 1]"]), (2, 4));
}

#[test]
fn invalid_json_is_refused() {
    refused(format!("{LINE}\nhello"), 2, "expected value");
    refused(format!("{LINE}\n\n{}", &LINE[..40]), 3, "EOF while parsing");
    refused(format!("{LINE}\n{LINE}{LINE}"), 2, "trailing characters");
    refused(format!("{LINE}\n[]"), 2, "invalid length 0");
    refused(format!("{LINE}\n\u{1f4a5}"), 2, "expected value");
    refused([LINE.as_bytes(), b"\n\xff\xfe{}"].concat(), 2, "expected value");
    for field in ["timestamp", "input_length", "output_length", "hash_ids"] {
        let without = LINE.replace(field, "other");
        refused(format!("{LINE}\n{without}"), 2, &format!("missing field `{field}`"));
        let twice = LINE.replace('}', &format!(", \"{field}\": 0}}"));
        refused(twice, 1, "");
    }
}

#[test]
fn numbers_must_be_counts() {
    for (length, ids, words) in [
        ("-1", "[]", "invalid value: integer `-1`"),
        ("1.5", "[1]", "invalid type: floating point"),
        ("\"9\"", "[1]", "invalid type: string"),
        ("null", "[1]", "invalid type: null"),
        ("99999999999999999999", "[1]", "invalid type: floating point"),
        ("1e999", "[1]", "number out of range"),
        ("1152921504606846976", "[1]", "1152921504606846976 input tokens, a request has at most"),
        ("512", "7", "invalid type: integer `7`"),
        ("512", "null", "invalid type: null"),
        ("512", "[-1]", "invalid value: integer `-1`"),
        ("512", "[\"a\"]", "invalid type: string"),
        ("512", "[18446744073709551616]", "invalid type: floating point"),
        ("512", "[1, 2]", "2 ids for 512 input tokens, 1 are needed"),
        ("513", "[1]", "1 ids for 513 input tokens, 2 are needed"),
        ("0", "[1]", "1 ids for 0 input tokens, 0 are needed"),
        ("1", "[]", "0 ids for 1 input tokens, 1 are needed"),
    ] {
        refused(format!("{LINE}\n{}", mooncake(length, ids)), 2, words);
    }
    refused(LINE.replace("\": 0", "\": -1"), 1, "timestamp is -1");
    refused(LINE.replace("\": 5", "\": -5"), 1, "invalid value: integer `-5`");
    assert!(read(mooncake("512", "[18446744073709551615]")).is_ok());
}

#[test]
fn a_csv_has_the_header_and_three_fields() {
    let csv = |text: &str| Trace::from_lines(lines(text), Some(Format::Azure), Sizes::default());
    let error = csv(&format!("time,in,out\n{ROW}")).expect_err("no header");
    assert_eq!(error.line, 1);
    assert!(error.error.to_string().starts_with("the header is \"time,in,out\", expected TIME"));
    refused(format!("{}\n{ROW}\n{ROW},1", csv::AZURE), 3, "4 fields, expected the 3");
    refused(format!("{}\n{ROW}\n{LINE}", csv::AZURE), 3, "5 fields");
    let huge = ROW.replace("374", "1152921504606846976");
    refused(format!("{}\n{huge}", csv::AZURE), 2, "1152921504606846976 input tokens");
    refused(format!("{ROW}\n"), 1, "neither a JSON object (Mooncake) nor the header");
}

#[test]
fn an_empty_file_is_refused() {
    for text in ["", "\n", "\r\n\r\n", "\u{feff}"] {
        let error = read(text).expect_err("nothing").error;
        assert!(matches!(error, TraceError::Empty), "{text:?}: {error}");
    }
    refused(csv::AZURE, 1, "the trace is empty");
}

#[test]
fn memory_is_bounded() {
    let row = ROW.replace("374", &INPUT_TOKENS_MAX.to_string());
    let rows = |count| [&[csv::AZURE][..], &vec![row.as_str(); count]].concat().join("\n");
    let with = |count, tokens| Trace::from_lines(lines(rows(count)), None, size(tokens));
    assert_eq!(u64::from(with(2, 1).expect("fits").num_blocks()), BLOCKS_MAX);
    let AtLine { line, error } = with(4, 1).expect_err("too many");
    assert_eq!(line, 4);
    assert!(error.to_string().starts_with("more than 33554432 blocks of 1 tokens"), "{error}");
    // One token of each id: their other 511 blocks have numbers too.
    let text: Vec<_> = (0..65_537).map(|id| mooncake("1", &format!("[{id}]"))).collect();
    let AtLine { line, error } =
        Trace::from_lines(lines(text.join("\n")), None, size(1)).expect_err("too many");
    assert!(matches!(error, TraceError::TooManyBlocks { .. }), "{error}");
    assert_eq!(line, 65_537);
}

#[test]
fn names_tell_the_format() {
    let named = |name: &str| Format::of_name(Path::new(name));
    assert_eq!(named("a/b.jsonl.zst"), Some(Format::Mooncake));
    assert_eq!(named("b.JSON"), Some(Format::Mooncake));
    assert_eq!(named("b.csv"), Some(Format::Azure));
    assert_eq!(named("b.csv.ZST"), Some(Format::Azure));
    for name in ["b", "b.zst", "b.txt", "csv"] {
        assert_eq!(named(name), None, "{name}");
    }
}
