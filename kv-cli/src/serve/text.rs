//! From the tokens of a text to the text for its client: whole characters, and nothing from a stop
//! string on.
use std::collections::VecDeque;
use std::sync::Arc;

use kv::engine::Finish;
use kv_runner::{TextStream, Tokenizer};

use super::engine::{Update, UpdateReceiver};

/// The next part of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Part {
    /// More text, not empty.
    Text(String),
    /// The end.
    End(Ended),
    /// The engine failed, with its words.
    Failed(String),
}

/// The end of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ended {
    /// `stop` or `length`.
    pub(super) reason: &'static str,
    /// Generated tokens.
    pub(super) tokens: usize,
    /// Tokens of the prompt that were cached.
    pub(super) cached: usize,
}

/// One text of a request. Dropped, it is cancelled.
#[derive(Debug)]
pub(super) struct Text {
    updates: UpdateReceiver,
    tokenizer: Arc<Tokenizer>,
    stream: TextStream,
    /// Whether special tokens are left out.
    skip_special: bool,
    stop: Stop,
    tokens: usize,
    cached: usize,
    /// Parts to be returned before the next update is taken.
    ready: VecDeque<Part>,
    has_ended: bool,
}

/// Last tokens of a prompt that decide how the first token after it reads.
const BEFORE: usize = 16;

impl Text {
    /// Returns the tokens of a prompt that decide how the text after it reads.
    pub(super) fn end_of(prompt: &[u32]) -> &[u32] {
        prompt.get(prompt.len().saturating_sub(BEFORE)..).unwrap_or(prompt)
    }

    /// Makes a text after a prompt, or the end of one.
    pub(super) fn new(
        updates: UpdateReceiver,
        tokenizer: Arc<Tokenizer>,
        prompt: &[u32],
        (stop, skip_special): (Arc<[String]>, bool),
    ) -> Self {
        Self {
            updates,
            tokenizer,
            stream: TextStream::after(Self::end_of(prompt)),
            skip_special,
            stop: Stop { stop, held: String::new() },
            tokens: 0,
            cached: 0,
            ready: VecDeque::new(),
            has_ended: false,
        }
    }

    /// Returns the next part; `None` after the end.
    pub(super) async fn next(&mut self) -> Option<Part> {
        loop {
            if let Some(part) = self.ready.pop_front() {
                return Some(part);
            }
            if self.has_ended {
                return None;
            }
            match self.updates.recv().await {
                Some(update) => self.take(update),
                None => self.end_with(Part::Failed("the engine has ended".to_owned())),
            }
        }
    }

    fn take(&mut self, update: Update) {
        match update {
            Update::Started { cached } => self.cached = cached,
            Update::Token(token) => {
                self.tokens += 1;
                if self.skip_special && self.tokenizer.is_special(token) {
                    return;
                }
                match self.stream.push(&self.tokenizer, token) {
                    Ok(piece) => self.add(&piece),
                    Err(error) => self.end_with(Part::Failed(error.to_string())),
                }
            }
            Update::Finished { finish, tokens, cached } => {
                (self.tokens, self.cached) = (tokens, cached);
                let rest = self.stream.finish(&self.tokenizer).unwrap_or_default();
                self.add(&rest);
                if self.has_ended {
                    return;
                }
                let reason = match finish {
                    Finish::Stop => "stop",
                    Finish::Length | Finish::Context | Finish::Cancelled => "length",
                };
                let held = std::mem::take(&mut self.stop.held);
                self.end_after(held, reason);
            }
            Update::Failed(why) => self.end_with(Part::Failed(why)),
        }
    }

    /// Adds a piece of text, up to a stop string.
    fn add(&mut self, piece: &str) {
        let (text, is_stopped) = self.stop.push(piece);
        if is_stopped {
            self.updates.close_at_stop();
            self.end_after(text, "stop");
        } else if !text.is_empty() {
            self.ready.push_back(Part::Text(text));
        }
    }

    fn end_after(&mut self, text: String, reason: &'static str) {
        if !text.is_empty() {
            self.ready.push_back(Part::Text(text));
        }
        self.end_with(Part::End(Ended { reason, tokens: self.tokens, cached: self.cached }));
    }

    fn end_with(&mut self, part: Part) {
        // The engine cancels texts without a receiver.
        self.updates.close();
        self.has_ended = true;
        self.ready.push_back(part);
    }
}

/// Looks for the texts that end a text, also across pieces.
#[derive(Debug)]
struct Stop {
    /// Shared by all texts of a request.
    stop: Arc<[String]>,
    /// The end of the text so far that a stop string may begin with.
    held: String,
}

impl Stop {
    /// Adds a piece; returns the text that is certain, and whether it ends there.
    fn push(&mut self, piece: &str) -> (String, bool) {
        let mut text = std::mem::take(&mut self.held);
        text.push_str(piece);
        if let Some(at) = self.stop.iter().filter_map(|stop| text.find(stop)).min() {
            text.truncate(at);
            return (text, true);
        }
        let starts = text.char_indices().map(|(at, _)| at);
        let begins_stop = |at: &usize| {
            let end = text.get(*at..).unwrap_or_default();
            self.stop.iter().any(|stop| stop.starts_with(end))
        };
        let certain = starts.into_iter().find(begins_stop).unwrap_or(text.len());
        self.held = text.split_off(certain);
        (text, false)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::engine::text_channel;
    use super::*;

    fn stopped(stop: &[&str], pieces: &[&str]) -> (String, bool, String) {
        let stop = stop.iter().map(|stop| (*stop).to_owned()).collect();
        let mut stop = Stop { stop, held: String::new() };
        let mut all = String::new();
        for piece in pieces {
            let (text, is_end) = stop.push(piece);
            all.push_str(&text);
            if is_end {
                return (all, true, stop.held);
            }
        }
        (all, false, stop.held)
    }

    #[test]
    fn a_stop_string_is_found_across_pieces_and_not_shown() {
        let end = |text: &str| (text.to_owned(), true, String::new());
        assert_eq!(stopped(&["END"], &["the END of"]), end("the "));
        assert_eq!(stopped(&["END"], &["the E", "N", "D"]), end("the "));
        assert_eq!(stopped(&["END"], &["EEN", "ENDD"]), end("EEN"));
        assert_eq!(stopped(&["aab"], &["a", "a", "a", "b"]), end("a"));
        assert_eq!(stopped(&["b", "abc"], &["ab"]), end("a"), "the first that is complete");
        assert_eq!(stopped(&["\u{e9}x"], &["caf\u{e9}", "x"]), end("caf"));
    }

    #[test]
    fn what_may_begin_a_stop_string_is_held_back() {
        assert_eq!(stopped(&["END"], &["the EN"]), ("the ".to_owned(), false, "EN".to_owned()),);
        assert_eq!(stopped(&["END"], &["EN", "x"]), ("ENx".to_owned(), false, String::new()),);
        assert_eq!(stopped(&[], &["a", "b"]), ("ab".to_owned(), false, String::new()));
    }

    fn tokenizer() -> Arc<Tokenizer> {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/stories260K/tokenizer.json");
        Arc::new(Tokenizer::read(&path).expect("the bundled tokenizer"))
    }

    fn parts(updates: Vec<Update>, stop: &[&str]) -> (Vec<Part>, Option<Finish>) {
        parts_of(updates, stop, false)
    }

    fn parts_of(
        updates: Vec<Update>,
        stop: &[&str],
        skip_special: bool,
    ) -> (Vec<Part>, Option<Finish>) {
        let (sender, receiver) = text_channel();
        for update in updates {
            sender.send(update);
        }
        let stop = stop.iter().map(|stop| (*stop).to_owned()).collect();
        let mut text = Text::new(receiver, tokenizer(), &[1], (stop, skip_special));
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let parts = runtime.block_on(async {
            let mut parts = Vec::new();
            while let Some(part) = text.next().await {
                parts.push(part);
            }
            parts
        });
        (parts, sender.finish_if_closed())
    }

    fn shown(parts: &[Part]) -> String {
        let text = parts.iter().filter_map(|part| match part {
            Part::Text(text) => Some(text.as_str()),
            _ => None,
        });
        text.collect()
    }

    #[test]
    fn a_text_ends_once_with_its_counts() {
        let model = kv_runner::ModelConfig::read(
            &Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/stories260K"),
        );
        let ids = tokenizer().encode("Once upon a time", &model.expect("config")).expect("ids");
        let tokens = || ids.tokens.iter().skip(1).map(|id| Update::Token(*id));
        let count = ids.tokens.len() - 1;
        let mut updates = vec![Update::Started { cached: 5 }];
        updates.extend(tokens());
        updates.push(Update::Finished { finish: Finish::Stop, tokens: count + 1, cached: 5 });
        let (all, closed) = parts(updates.clone(), &[]);
        assert_eq!(shown(&all).trim(), "Once upon a time");
        let end = Ended { reason: "stop", tokens: count + 1, cached: 5 };
        assert_eq!((all.last(), closed), (Some(&Part::End(end)), Some(Finish::Cancelled)));
        // The stop string ends it before.
        let (all, closed) = parts(updates.clone(), &["pon a"]);
        assert_eq!(shown(&all).trim(), "Once u");
        let Some(Part::End(ended)) = all.last() else { panic!("{all:?}") };
        assert_eq!((ended.reason, ended.cached, closed), ("stop", 5, Some(Finish::Stop)));
        assert!(ended.tokens <= count);
        // The held-back text is shown at the end.
        let (all, _) = parts(updates, &["time flies"]);
        assert_eq!(shown(&all).trim(), "Once upon a time");
    }

    #[test]
    fn special_tokens_are_text_unless_skipped() {
        let end = 2;
        assert!(tokenizer().is_special(end) && !tokenizer().is_special(403));
        let updates = || {
            let mut updates: Vec<_> = [403, end, 403].map(Update::Token).into();
            updates.push(Update::Finished { finish: Finish::Length, tokens: 3, cached: 0 });
            updates
        };
        let special = tokenizer().decode(&[end]).expect("a token");
        let [all, skipped] = [false, true].map(|skip| parts_of(updates(), &[], skip).0);
        assert!(shown(&all).contains(&special), "{all:?}");
        assert!(!shown(&skipped).contains(&special) && !shown(&skipped).is_empty(), "{skipped:?}");
        for parts in [all, skipped] {
            let Some(Part::End(ended)) = parts.last() else { panic!("{parts:?}") };
            assert_eq!((ended.tokens, ended.reason), (3, "length"));
        }
    }

    #[test]
    fn a_failure_is_the_end() {
        let failed = Update::Failed("no".to_owned());
        let (all, closed) = parts(vec![failed, Update::Token(5)], &[]);
        let failed = vec![Part::Failed("no".to_owned())];
        assert_eq!((all, closed), (failed, Some(Finish::Cancelled)));
    }
}
