//! The fewest tokens that a text can have, from its length alone.
//!
//! A token stands for the bytes of its entry in the vocabulary. Where a tokenizer drops and
//! shortens nothing, the tokens of a text cover all its bytes, so that a text of `n` bytes has at
//! least `n / longest entry` tokens.
use std::num::NonZeroUsize;

use serde::Deserialize;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

/// The parts of a `tokenizer.json` that decide whether every byte of a text becomes a token.
#[derive(Debug, Deserialize)]
struct Parts {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    normalizer: Option<Normalizer>,
    pre_tokenizer: Option<PreTokenizer>,
    model: Model,
}

#[derive(Debug, Deserialize)]
struct AddedToken {
    content: String,
    /// Whether the token is searched in the normalized text.
    #[serde(default = "yes")]
    normalized: bool,
    /// Whether the token takes blanks around it along.
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
}

fn yes() -> bool {
    true
}

#[derive(Debug, Deserialize)]
struct Model {
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type")]
enum Normalizer {
    Sequence {
        normalizers: Vec<Self>,
    },
    Prepend {
        prepend: String,
    },
    Replace {
        pattern: Pattern,
        content: String,
    },
    #[serde(other)]
    Other,
}

#[derive(Debug, Deserialize)]
enum Pattern {
    String(String),
    Regex(#[expect(dead_code, reason = "it may match a text of any length")] String),
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type")]
enum PreTokenizer {
    Sequence {
        pretokenizers: Vec<Self>,
    },
    Split {
        behavior: String,
    },
    Digits,
    ByteLevel,
    Metaspace,
    #[serde(other)]
    Other,
}

/// Returns the most bytes of a text that one token can stand for; `None` for a tokenizer that may
/// drop or shorten parts of a text, so that a text of any length may have one token.
pub(super) fn token_bytes_max(
    json: &str,
    tokenizer: &tokenizers::Tokenizer,
) -> Option<NonZeroUsize> {
    let parts: Parts = serde_json::from_str(json).ok()?;
    let growth = parts.normalizer.as_ref().map_or(Some(1), growth)?;
    let is_byte_level = keeps_all(parts.pre_tokenizer.as_ref())?;
    // Other models make one token of any number of unknown characters.
    if parts.model.kind.as_deref() != Some("BPE") {
        return None;
    }
    let vocab = tokenizer.get_vocab(false);
    let has_bytes = if is_byte_level {
        // Those of bytes above 0xAD are the characters of these numbers.
        let symbols = ByteLevel::alphabet();
        let mut symbols = symbols.into_iter().filter(|symbol| is_in_utf8((*symbol).into()));
        symbols.all(|symbol| vocab.contains_key(&symbol.to_string()))
    } else {
        let mut bytes = (0..=0xFF).filter(|byte| is_in_utf8(*byte));
        parts.model.byte_fallback
            && bytes.all(|byte| vocab.contains_key(&format!("<0x{byte:02X}>")))
    };
    if !has_bytes || parts.added_tokens.iter().any(|token| token.lstrip || token.rstrip) {
        return None;
    }
    // The alphabet of byte-level tokenizers has one character for each byte.
    let length = |entry: &String| if is_byte_level { entry.chars().count() } else { entry.len() };
    let of_vocab = vocab.keys().map(length).max()?;
    let added = parts
        .added_tokens
        .iter()
        // Saturating, because a file may have any normalizers.
        .map(|token| token.content.len().saturating_mul(if token.normalized { growth } else { 1 }));
    NonZeroUsize::new(of_vocab.max(added.max().unwrap_or(0)))
}

/// Returns the largest factor by which a normalizer makes a text longer; `None` if it may make one
/// shorter.
fn growth(normalizer: &Normalizer) -> Option<usize> {
    match normalizer {
        Normalizer::Sequence { normalizers } => normalizers
            .iter()
            .try_fold(1_usize, |factor, one| Some(factor.saturating_mul(growth(one)?))),
        // For a text of one byte or more.
        Normalizer::Prepend { prepend } => Some(prepend.len() + 1),
        Normalizer::Replace { pattern: Pattern::String(pattern), content } => {
            (!pattern.is_empty() && content.len() >= pattern.len()).then_some(content.len())
        }
        Normalizer::Replace { pattern: Pattern::Regex(_), .. } | Normalizer::Other => None,
    }
}

/// Returns whether the pieces are of the byte-level alphabet; `None` if parts of a text may be
/// missing in them.
fn keeps_all(pre_tokenizer: Option<&PreTokenizer>) -> Option<bool> {
    match pre_tokenizer {
        None | Some(PreTokenizer::Digits | PreTokenizer::Metaspace) => Some(false),
        Some(PreTokenizer::ByteLevel) => Some(true),
        Some(PreTokenizer::Split { behavior }) => (behavior != "Removed").then_some(false),
        Some(PreTokenizer::Sequence { pretokenizers }) => {
            pretokenizers.iter().try_fold(false, |found, one| Some(found | keeps_all(Some(one))?))
        }
        Some(PreTokenizer::Other) => None,
    }
}

/// Returns whether a text of UTF-8 can have this byte.
fn is_in_utf8(byte: u32) -> bool {
    !matches!(byte, 0xC0 | 0xC1 | 0xF5..=0xFF)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;

    fn bundled() -> Value {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/stories260K/tokenizer.json");
        let text = std::fs::read_to_string(path).expect("the bundled tokenizer");
        serde_json::from_str(&text).expect("JSON")
    }

    fn bound(tokenizer: &Value) -> Option<usize> {
        let json = tokenizer.to_string();
        let tokenizer = tokenizers::Tokenizer::from_bytes(&json).expect("a tokenizer");
        token_bytes_max(&json, &tokenizer).map(NonZeroUsize::get)
    }

    #[test]
    fn the_longest_entry_is_the_bound() {
        assert_eq!(bound(&bundled()), Some("\u{2581}friend".len()));
        let mut added = bundled();
        added["added_tokens"][2]["content"] = json!("</a longer end of a text>");
        assert_eq!(bound(&added), Some("</a longer end of a text>".len()));
        added["added_tokens"][2]["normalized"] = true.into();
        // Each of its bytes may be a blank, which becomes three.
        let prepended = "\u{2581}".len() + 1;
        assert_eq!(bound(&added), Some("</a longer end of a text>".len() * 3 * prepended));
    }

    #[test]
    fn a_tokenizer_that_may_drop_text_has_no_bound() {
        let with = |change: &dyn Fn(&mut Value)| {
            let mut tokenizer = bundled();
            change(&mut tokenizer);
            bound(&tokenizer)
        };
        assert_eq!(with(&|all| all["model"]["byte_fallback"] = false.into()), None);
        assert_eq!(with(&|all| all["added_tokens"][1]["rstrip"] = true.into()), None);
        assert_eq!(with(&|all| all["normalizer"] = json!({"type": "NFC"})), None);
        assert_eq!(with(&|all| all["pre_tokenizer"] = json!({"type": "Whitespace"})), None);
        let shorter = json!({"type": "Replace", "pattern": {"String": "  "}, "content": " "});
        assert_eq!(with(&|all| all["normalizer"] = shorter.clone()), None);
        // Byte-level pieces need other entries.
        let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true});
        assert_eq!(with(&|all| all["pre_tokenizer"] = level.clone()), None);
    }

    #[test]
    fn a_byte_level_tokenizer_has_one_character_a_byte() {
        let mut vocab = serde_json::Map::new();
        for symbol in ByteLevel::alphabet() {
            vocab.insert(symbol.to_string(), vocab.len().into());
        }
        vocab.insert("\u{c3}\u{a9}\u{120}".to_owned(), vocab.len().into());
        let tokenizer = |vocab: &serde_json::Map<String, Value>| {
            json!({
                "version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null,
                "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                    {"type": "Digits", "individual_digits": true},
                    {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true},
                ]},
                "decoder": null, "model": {"type": "BPE", "vocab": vocab, "merges": []},
            })
        };
        assert_eq!(bound(&tokenizer(&vocab)), Some(3));
        vocab.remove("\u{ff}");
        assert_eq!(bound(&tokenizer(&vocab)), Some(3), "no text has this byte");
        vocab.remove("A");
        assert_eq!(bound(&tokenizer(&vocab)), None);
    }
}
