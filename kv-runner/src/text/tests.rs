//! Tokens of texts, and texts of tokens, whole and in pieces.
use std::path::PathBuf;

use super::*;

fn dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/stories260K")
}

fn bundled() -> Tokenizer {
    Tokenizer::read(&dir().join("tokenizer.json")).expect("the bundled tokenizer")
}

fn model(vocab: u32, bos: Option<u32>) -> ModelConfig {
    ModelConfig { vocab, bos, ..ModelConfig::read(&dir()).expect("the bundled model") }
}

fn encode(prompt: &str) -> Vec<u32> {
    bundled().encode(prompt, &model(512, Some(1))).expect("tokens").tokens
}

#[test]
fn pieces_of_a_stream_are_whole_characters_and_add_up() {
    let text = bundled();
    let written = "Tom said: h\u{e9}llo \u{4e16}\u{754c} \u{1f389}\u{1f468}\u{200d}\u{1f469}! ok";
    let ids = encode(written);
    assert!(ids.len() > 30, "most of these characters are several tokens");
    for split in [1, 4, 6] {
        let (prompt, rest) = ids.split_at(split);
        let mut stream = TextStream::after(prompt);
        let mut shown = String::new();
        for id in rest {
            let piece = stream.push(&text, *id).expect("a piece");
            assert!(!piece.contains(char::REPLACEMENT_CHARACTER), "{piece:?} after {shown:?}");
            shown.push_str(&piece);
        }
        shown.push_str(&stream.finish(&text).expect("the rest"));
        // The begin token is no text.
        let all = text.decode(&ids[1..]).expect("text");
        assert!(all.ends_with(&shown), "{all:?} {shown:?}");
        let prompt = text.decode(&prompt[1..]).expect("text");
        assert_eq!(format!("{prompt}{shown}"), all);
    }
}

#[test]
fn the_text_after_a_prompt_keeps_its_first_blank() {
    let text = bundled();
    for written in ["Once upon a time", "a  b", "caf\u{e9} \u{1f389} x"] {
        let ids = encode(written);
        // The begin token is no text.
        let all = text.decode(&ids[1..]).expect("text");
        assert_eq!(all, written);
        for split in 0..=ids.len() {
            let (before, after) = ids.split_at(split);
            let after = if split == 0 { &after[1..] } else { after };
            let shown = text.decode_after(before, after).expect("text");
            let prompt = text.decode(before.get(1..).unwrap_or_default()).expect("text");
            if !prompt.ends_with(char::REPLACEMENT_CHARACTER) {
                assert_eq!(format!("{prompt}{shown}"), all, "{written:?} at {split}");
            }
        }
    }
    assert_eq!(text.decode_after(&encode("Once"), &[]).expect("text"), "");
}

#[test]
fn more_text_is_what_was_written() {
    let (text, model) = (bundled(), model(512, Some(1)));
    let before = encode("Once upon");
    for more in [" a time", "a", " ", "  two", "\n", "\nx", "\n\n y", "ly", "\u{e9}", "<s>", ""] {
        let tokens = text.encode_more(&before, more, &model).expect("tokens");
        assert_eq!(text.decode_after(&before, &tokens).expect("text"), more, "{tokens:?}");
        let all = text.decode(&[&*before, &tokens].concat()).expect("text");
        assert_eq!(all, format!("<s> Once upon{more}"));
    }
    assert!(text.encode_more(&before, "", &model).expect("tokens").is_empty());
}

#[test]
fn bytes_that_are_no_character_do_not_stop_the_stream() {
    let text = bundled();
    // The byte tokens of a lead byte without continuation, then plain text.
    let lead = 3 + 0xE4;
    let plain = encode("the end");
    let mut stream = TextStream::after(&[1]);
    let mut shown = String::new();
    for id in [lead, lead].iter().chain(&plain[1..]) {
        shown.push_str(&stream.push(&text, *id).expect("a piece"));
    }
    assert!(shown.ends_with("the end"), "{shown:?}");
}

#[test]
fn a_prompt_that_begins_with_the_begin_token_has_it_once() {
    let plain = encode("Once");
    assert_eq!((plain[0], plain.len() > 1), (1, true));
    let begun = encode("<s>Once");
    assert_eq!(begun.iter().filter(|id| **id == 1).count(), 1, "{begun:?}");
    assert_eq!(encode("<s>"), [1]);
    let said = |prompt| bundled().encode(prompt, &model(512, Some(1))).expect("tokens");
    assert_eq!(said("<s>Once").repeated_begin.as_deref(), Some("<s>"));
    assert_eq!(said("Once").repeated_begin, None);
    let inside = encode("Once <s>");
    assert_eq!(inside.iter().filter(|id| **id == 1).count(), 2, "{inside:?}");
    // A begin token that is written twice is kept twice.
    let twice = encode("<s><s>Once");
    assert_eq!(twice.iter().filter(|id| **id == 1).count(), 2, "{twice:?}");
}

#[test]
fn no_text_has_fewer_tokens_than_its_length_says() {
    let text = bundled();
    let longest = text.tokens(&"\u{2581}friend".repeat(100), false).expect("tokens").len();
    for written in ["", "a", " ", "friend", "\u{1f389}", "</s></s>", "Once upon a time  \n"] {
        for count in [1, 7, 100] {
            let written = written.repeat(count);
            let tokens = text.tokens(&written, false).expect("tokens").len();
            assert!(text.tokens_at_least(written.len()) <= tokens, "{written:?}");
        }
    }
    // The bound is not far off.
    assert!(text.tokens_at_least("\u{2581}friend".len() * 100) * 2 >= longest, "{longest}");
}

#[test]
fn only_what_a_tokenizer_adds_at_the_begin_is_dropped() {
    assert_eq!(added_before(&[1, 1, 7], &[1, 7]), 1);
    assert_eq!(added_before(&[1, 1], &[1]), 1);
    assert_eq!(added_before(&[1, 2, 1, 2, 7, 9], &[1, 2, 7]), 2);
    for (ids, plain) in [
        (&[1, 7][..], &[7][..]),
        (&[7, 7], &[7, 7]),
        (&[7, 1], &[7]),
        (&[1], &[]),
        (&[], &[]),
        (&[1, 7, 9], &[1, 8]),
    ] {
        assert_eq!(added_before(ids, plain), 0, "{ids:?} {plain:?}");
    }
}

#[test]
fn an_empty_prompt_is_the_begin_token() {
    assert_eq!(bundled().encode("", &model(512, None)).expect("tokens").tokens, [1]);
}

#[test]
fn a_token_beyond_the_vocabulary_is_refused() {
    let error = bundled().encode("Once upon a time", &model(300, None)).expect_err("403 is beyond");
    assert!(error.to_string().contains("the model knows 300"), "{error}");
}
