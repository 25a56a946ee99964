//! Text to tokens and back, whole or as a stream; text files.
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, anyhow, bail};
use tokenizers::Tokenizer;

use crate::output;

/// Byte order marks, the longer of two that begin alike first.
const MARKS: [(&[u8], &str); 5] = [
    (b"\xef\xbb\xbf", "UTF-8"),
    (b"\xff\xfe\0\0", "UTF-32"),
    (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
];

/// A file that is no UTF-8.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TextError {
    #[error("the file is {encoding} by its byte order mark, expected UTF-8")]
    Encoding { encoding: &'static str },
    #[error("not UTF-8, the first wrong byte is at {at}")]
    NotUtf8 { at: usize },
}

/// Reads a text file of UTF-8, without its byte order mark.
pub(crate) fn read_text(path: &Path) -> anyhow::Result<String> {
    let describe = || path.display().to_string();
    let bytes = std::fs::read(path).with_context(describe)?;
    Ok(without_mark(&bytes).with_context(describe)?.to_owned())
}

/// The text behind a byte order mark of UTF-8; other marks are refused.
pub(crate) fn without_mark(bytes: &[u8]) -> Result<&str, TextError> {
    let found = MARKS.iter().find(|(mark, _)| bytes.starts_with(mark));
    let text = match found {
        None => bytes,
        Some((mark, "UTF-8")) => bytes.strip_prefix(*mark).unwrap_or(bytes),
        Some((_, encoding)) => return Err(TextError::Encoding { encoding }),
    };
    std::str::from_utf8(text).map_err(|error| TextError::NotUtf8 {
        at: bytes.len().saturating_sub(text.len()).saturating_add(error.valid_up_to()),
    })
}

/// The tokenizer of one model.
#[derive(Debug)]
pub(crate) struct Text {
    tokenizer: Tokenizer,
    /// Whether it was said that a prompt brings its begin token itself.
    noted_begin: AtomicBool,
}

impl Text {
    pub(crate) fn read(path: &Path) -> anyhow::Result<Self> {
        let describe = || path.display().to_string();
        let text = read_text(path)?;
        // tokenizers 0.23 panics on some files that are no JSON at all.
        serde_json::from_str::<serde::de::IgnoredAny>(&text)
            .context("not a tokenizer.json")
            .with_context(describe)?;
        let mut tokenizer = Tokenizer::from_bytes(&text)
            .map_err(|error| anyhow!("not a tokenizer.json: {error}"))
            .with_context(describe)?;
        // A file may ask to cut or pad its inputs, which is for training.
        tokenizer.with_truncation(None).map_err(|error| anyhow!(error)).with_context(describe)?;
        tokenizer.with_padding(None);
        Ok(Self { tokenizer, noted_begin: AtomicBool::new(false) })
    }

    /// Tokens of a prompt, with the special tokens the tokenizer itself adds, but for those at the
    /// begin that the prompt brings itself. A prompt that has no tokens becomes `bos` alone.
    pub(crate) fn encode(
        &self,
        prompt: &str,
        vocab: u32,
        bos: Option<u32>,
    ) -> anyhow::Result<Vec<u32>> {
        let mut ids = self.ids(prompt, true)?;
        let added = added_before(&ids, &self.ids(prompt, false)?);
        if added > 0 {
            let begin = ids.drain(..added).collect::<Vec<_>>();
            if !self.noted_begin.swap(true, Ordering::Relaxed) {
                let begin = self.decode(&begin)?;
                output::note(&format!("a prompt begins with {begin:?}, it is not added again"))?;
            }
        }
        if ids.is_empty() {
            ids.push(bos.context("the prompt is empty and the model has no bos_token_id")?);
        }
        if let Some(id) = ids.iter().find(|id| **id >= vocab) {
            bail!(
                "the tokenizer gives token {id}, the model knows {vocab}: do they belong together?"
            );
        }
        Ok(ids)
    }

    fn ids(&self, prompt: &str, with_special: bool) -> anyhow::Result<Vec<u32>> {
        let encoding = self.tokenizer.encode(prompt, with_special);
        Ok(encoding.map_err(|error| anyhow!(error))?.get_ids().to_vec())
    }

    /// Text of these tokens, special ones included.
    pub(crate) fn decode(&self, ids: &[u32]) -> anyhow::Result<String> {
        self.tokenizer.decode(ids, false).map_err(|error| anyhow!(error))
    }
}

/// Tokens that a tokenizer put before those of the `plain` text although it begins with them.
fn added_before(ids: &[u32], plain: &[u32]) -> usize {
    let most = ids.len().saturating_sub(plain.len());
    let is_prefix = |count: &usize| {
        let (before, behind) = ids.split_at(*count);
        behind.starts_with(plain) && plain.starts_with(before)
    };
    (1..=most).rev().find(is_prefix).unwrap_or(0)
}

/// Text that grows token by token.
///
/// A token may be part of a character, and a decoder may treat the first token of a text in a way
/// of its own. So each piece is the difference of two decodings that begin with the piece before it
/// (never inside a character: one broken byte breaks all bytes beside it), and a piece that ends
/// inside a character waits for the rest.
#[derive(Debug)]
pub(crate) struct TextStream {
    ids: Vec<u32>,
    /// Where decoding begins.
    begin: usize,
    /// Tokens whose text is out already.
    shown: usize,
}

/// A character has at most four bytes: what is still no character after that never will be.
const WAIT_MAX: usize = 4;

impl TextStream {
    /// Goes on behind a prompt.
    pub(crate) fn after(prompt: &[u32]) -> Self {
        Self { ids: prompt.to_vec(), begin: 0, shown: prompt.len() }
    }

    /// Adds a token; the text that is certain now.
    pub(crate) fn push(&mut self, text: &Text, id: u32) -> anyhow::Result<String> {
        self.ids.push(id);
        let waiting = self.ids.len().saturating_sub(self.shown);
        self.advance(text, waiting >= WAIT_MAX)
    }

    /// The text that was still waiting.
    pub(crate) fn finish(&mut self, text: &Text) -> anyhow::Result<String> {
        self.advance(text, true)
    }

    fn advance(&mut self, text: &Text, even_broken: bool) -> anyhow::Result<String> {
        let decode = |end| text.decode(self.ids.get(self.begin..end).unwrap_or_default());
        let (old, new) = (decode(self.shown)?, decode(self.ids.len())?);
        if !even_broken && new.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(String::new());
        }
        // The old text may end in a broken character that the new token repairs.
        let repaired = || new.strip_prefix(old.trim_end_matches(char::REPLACEMENT_CHARACTER));
        let piece = new.strip_prefix(&old).or_else(repaired).unwrap_or_default().to_owned();
        self.begin = self.shown;
        self.shown = self.ids.len();
        Ok(piece)
    }
}

/// Where the tokenizer of a model lies.
pub(crate) fn tokenizer_path(
    model: &Path,
    given: Option<&Path>,
) -> anyhow::Result<std::path::PathBuf> {
    if let Some(path) = given {
        return Ok(path.to_owned());
    }
    let dir = if model.is_file() { model.parent().unwrap_or(Path::new(".")) } else { model };
    let path = dir.join("tokenizer.json");
    if model.is_file() && !path.is_file() {
        bail!("{}: no tokenizer.json beside it, give --tokenizer FILE", model.display());
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bundled() -> Text {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/stories260K");
        Text::read(&dir.join("tokenizer.json")).expect("the bundled tokenizer")
    }

    #[test]
    fn pieces_of_a_stream_are_whole_characters_and_add_up() {
        let text = bundled();
        let written =
            "Tom said: h\u{e9}llo \u{4e16}\u{754c} \u{1f389}\u{1f468}\u{200d}\u{1f469}! ok";
        let ids = text.encode(written, 512, Some(1)).expect("ids");
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
            let all = text.decode(&ids).expect("text");
            assert!(all.ends_with(&shown), "{all:?} {shown:?}");
            let prompt = text.decode(prompt).expect("text");
            assert_eq!(format!("{prompt}{shown}"), all);
        }
    }

    #[test]
    fn bytes_that_are_no_character_do_not_stop_the_stream() {
        let text = bundled();
        // The byte tokens of a lead byte that nothing continues, then plain text.
        let lead = 3 + 0xE4;
        let plain = text.encode("the end", 512, Some(1)).expect("ids");
        let mut stream = TextStream::after(&[1]);
        let mut shown = String::new();
        for id in [lead, lead].iter().chain(&plain[1..]) {
            shown.push_str(&stream.push(&text, *id).expect("a piece"));
        }
        assert!(shown.ends_with("the end"), "{shown:?}");
    }

    #[test]
    fn a_prompt_that_begins_with_the_begin_token_has_it_once() {
        let text = bundled();
        let plain = text.encode("Once", 512, Some(1)).expect("ids");
        assert_eq!((plain[0], plain.len() > 1), (1, true));
        let begun = text.encode("<s>Once", 512, Some(1)).expect("ids");
        assert_eq!(begun.iter().filter(|id| **id == 1).count(), 1, "{begun:?}");
        assert_eq!(text.encode("<s>", 512, Some(1)).expect("ids"), [1]);
        let inside = text.encode("Once <s>", 512, Some(1)).expect("ids");
        assert_eq!(inside.iter().filter(|id| **id == 1).count(), 2, "{inside:?}");
        // What is written twice is meant twice.
        let twice = text.encode("<s><s>Once", 512, Some(1)).expect("ids");
        assert_eq!(twice.iter().filter(|id| **id == 1).count(), 2, "{twice:?}");
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
    fn marks_are_taken_off_or_refused() {
        assert_eq!(without_mark(b"\xef\xbb\xbfab"), Ok("ab"));
        assert_eq!(without_mark(b"ab"), Ok("ab"));
        assert_eq!(without_mark(b"\xef\xbb\xbf"), Ok(""));
        assert_eq!(without_mark(b""), Ok(""));
        for (bytes, encoding) in [
            (&b"\xff\xfea\0"[..], "UTF-16"),
            (b"\xfe\xff\0a", "UTF-16"),
            (b"\xff\xfe\0\0a\0\0\0", "UTF-32"),
            (b"\0\0\xfe\xff\0\0\0a", "UTF-32"),
        ] {
            assert_eq!(without_mark(bytes), Err(TextError::Encoding { encoding }), "{bytes:?}");
        }
        assert_eq!(without_mark(b"\xef\xbb\xbfa\xffb"), Err(TextError::NotUtf8 { at: 4 }));
    }

    #[test]
    fn an_empty_prompt_is_the_begin_token() {
        assert_eq!(bundled().encode("", 512, None).expect("ids"), [1]);
    }

    #[test]
    fn a_token_beyond_the_vocabulary_is_refused() {
        let error = bundled().encode("Once upon a time", 300, None).expect_err("403 is beyond");
        assert!(error.to_string().contains("the model knows 300"), "{error}");
    }
}
