//! Converts text to tokens and back, whole or as a stream.
mod bound;

use std::num::NonZeroUsize;
use std::path::Path;

use crate::config::ModelConfig;
use crate::error::{Error, ForeignError, InFile, TextError};
use crate::text_file::read_text;

impl TextError {
    fn tokenizer(error: tokenizers::Error) -> Self {
        Self::Tokenizer(ForeignError::new(error))
    }
}

/// The tokenizer of one model, from its `tokenizer.json`.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Most bytes of a text that one token stands for.
    token_bytes_max: Option<NonZeroUsize>,
}

/// A prompt as tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Encoded {
    /// At least one token.
    pub tokens: Vec<u32>,
    /// Special tokens at the begin of the prompt that the tokenizer would have added again, as
    /// text. [`Self::tokens`] has them once.
    pub repeated_begin: Option<String>,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`. Its truncation and padding are for training and are ignored.
    ///
    /// # Errors
    /// [`Error::File`] with the cause: [`Error::Io`] or [`TextError`].
    pub fn read(path: &Path) -> Result<Self, Error> {
        let text = read_text(path)?;
        Self::parse(&text).in_file(path)
    }

    fn parse(text: &str) -> Result<Self, TextError> {
        let refuse = |source| TextError::NotTokenizer { source };
        // tokenizers 0.23 panics on some files that are not JSON.
        serde_json::from_str::<serde::de::IgnoredAny>(text)
            .map_err(|error| refuse(ForeignError::new(error)))?;
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(text)
            .map_err(|error| refuse(ForeignError::new(error)))?;
        tokenizer.with_truncation(None).map_err(TextError::tokenizer)?;
        tokenizer.with_padding(None);
        let token_bytes_max = bound::token_bytes_max(text, &tokenizer);
        Ok(Self { inner: tokenizer, token_bytes_max })
    }

    /// Returns a number of tokens that a text of this length has at least, in no time: its bytes
    /// over those of the longest token. 0 for a tokenizer that may drop or shorten parts of a
    /// text, such as blanks.
    pub fn tokens_at_least(&self, bytes: usize) -> usize {
        self.token_bytes_max.map_or(0, |max| bytes.div_ceil(max.get()))
    }

    /// Converts a prompt to tokens of a model. The tokenizer's special tokens are added, except
    /// those at the begin that the prompt has already. A prompt without tokens becomes the model's
    /// begin token.
    ///
    /// # Errors
    /// [`TextError::Empty`] for a model without a begin token, [`TextError::BeyondVocabulary`] for
    /// a tokenizer of another model.
    pub fn encode(&self, prompt: &str, model: &ModelConfig) -> Result<Encoded, Error> {
        let mut tokens = self.tokens(prompt, true)?;
        let added = added_before(&tokens, &self.tokens(prompt, false)?);
        let repeated: Vec<u32> = tokens.drain(..added).collect();
        let repeated_begin = if added > 0 { Some(self.decode(&repeated)?) } else { None };
        if tokens.is_empty() {
            tokens.push(model.bos.ok_or(TextError::Empty)?);
        }
        check_vocabulary(&tokens, model)?;
        Ok(Encoded { tokens, repeated_begin })
    }

    /// Converts text that goes on after the tokens `before` to tokens of a model, without special
    /// tokens; none for an empty text.
    ///
    /// # Errors
    /// [`TextError::BeyondVocabulary`] for a tokenizer of another model.
    pub fn encode_more(
        &self,
        before: &[u32],
        text: &str,
        model: &ModelConfig,
    ) -> Result<Vec<u32>, Error> {
        let mut tokens = self.tokens(text, false)?;
        if self.decode_after(before, &tokens)? != text {
            // SentencePiece begins each text with a blank. One that goes on is encoded after
            // something else, which no token has a part of.
            let inside = self.tokens(&format!("{BREAK}{text}"), false)?;
            if let Some(inside) = inside.strip_prefix(self.tokens(BREAK, false)?.as_slice()) {
                tokens = inside.to_vec();
            }
        }
        check_vocabulary(&tokens, model)?;
        Ok(tokens)
    }

    /// Returns whether a token is special, such as one that ends a text.
    pub fn is_special(&self, token: u32) -> bool {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        added.get(&token).is_some_and(|token| token.special)
    }

    /// Counts the special tokens before the first other one.
    fn num_special_first(&self, tokens: &[u32]) -> usize {
        tokens.iter().take_while(|token| self.is_special(**token)).count()
    }

    fn tokens(&self, prompt: &str, with_special: bool) -> Result<Vec<u32>, TextError> {
        let encoding = self.inner.encode(prompt, with_special);
        Ok(encoding.map_err(TextError::tokenizer)?.get_ids().to_vec())
    }

    /// Returns the text of tokens that follow others, as a [`TextStream`] gives it: appended to the
    /// text of `before`, it is the text of all tokens.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`].
    pub fn decode_after(&self, before: &[u32], tokens: &[u32]) -> Result<String, Error> {
        let mut stream = TextStream::after(before);
        let mut text = String::new();
        for token in tokens {
            text.push_str(&stream.push(self, *token)?);
        }
        text.push_str(&stream.finish(self)?);
        Ok(text)
    }

    /// Returns the text of these tokens, including special ones. Tokens that follow others may
    /// begin with a blank that is missing here: [`Self::decode_after`].
    ///
    /// # Errors
    /// [`TextError::Tokenizer`].
    pub fn decode(&self, tokens: &[u32]) -> Result<String, Error> {
        Ok(self.inner.decode(tokens, false).map_err(TextError::tokenizer)?)
    }
}

/// Text that merges with nothing after it in `SentencePiece` vocabularies.
const BREAK: &str = "\n";

/// Refuses tokens that a model does not know.
///
/// # Errors
/// [`TextError::BeyondVocabulary`].
pub fn check_vocabulary(tokens: &[u32], model: &ModelConfig) -> Result<(), TextError> {
    let vocab = model.vocab;
    match tokens.iter().copied().find(|token| *token >= vocab) {
        Some(token) => Err(TextError::BeyondVocabulary { token, vocab }),
        None => Ok(()),
    }
}

/// Counts tokens that a tokenizer added before the tokens of the `plain` text, which already begins
/// with these.
fn added_before(ids: &[u32], plain: &[u32]) -> usize {
    let most = ids.len().saturating_sub(plain.len());
    let is_prefix = |count: &usize| {
        let (before, after) = ids.split_at(*count);
        after.starts_with(plain) && plain.starts_with(before)
    };
    (1..=most).rev().find(is_prefix).unwrap_or(0)
}

/// The text of a sequence that grows token by token.
///
/// A token may be a part of a character, and a decoder may treat the first token of a text
/// differently. So each piece is the difference of two decodings that begin with the previous piece
/// (never inside a character: one broken byte breaks all bytes beside it), and a piece that ends
/// inside a character is held back until the rest arrives.
#[derive(Debug)]
pub struct TextStream {
    ids: Vec<u32>,
    /// Index at which decoding begins; `None` before the first piece.
    begin: Option<usize>,
    /// Tokens whose text was returned already.
    shown: usize,
}

/// A character has at most four bytes: a longer invalid sequence never becomes one.
const WAIT_MAX: usize = 4;

impl TextStream {
    /// Starts after the tokens of a prompt, whose own text is not returned. Special tokens before
    /// the first word are no text: after them a text begins as it does without a prompt.
    pub fn after(prompt: &[u32]) -> Self {
        Self { ids: prompt.to_vec(), begin: None, shown: prompt.len() }
    }

    /// Adds a token and returns the text that is complete now.
    ///
    /// # Errors
    /// Those of [`Tokenizer::decode`].
    pub fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> Result<String, Error> {
        self.ids.push(token);
        let waiting = self.ids.len() - self.shown;
        self.advance(tokenizer, waiting >= WAIT_MAX)
    }

    /// Returns the text that was held back.
    ///
    /// # Errors
    /// Those of [`Tokenizer::decode`].
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String, Error> {
        self.advance(tokenizer, true)
    }

    fn advance(&mut self, tokenizer: &Tokenizer, even_broken: bool) -> Result<String, Error> {
        let begin = self.begin.unwrap_or_else(|| {
            tokenizer.num_special_first(self.ids.get(..self.shown).unwrap_or_default())
        });
        let decode = |end| tokenizer.decode(self.ids.get(begin..end).unwrap_or_default());
        let (old, new) = (decode(self.shown)?, decode(self.ids.len())?);
        if !even_broken && new.ends_with(char::REPLACEMENT_CHARACTER) {
            self.begin = Some(begin);
            return Ok(String::new());
        }
        // The old text may end in a broken character that the new token completes.
        let repaired = || new.strip_prefix(old.trim_end_matches(char::REPLACEMENT_CHARACTER));
        let piece = new.strip_prefix(&old).or_else(repaired).unwrap_or_default().to_owned();
        self.begin = Some(self.shown);
        self.shown = self.ids.len();
        Ok(piece)
    }
}

#[cfg(test)]
mod tests;
