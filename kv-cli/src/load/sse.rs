//! Server-sent events as completions stream them: `data: ` lines, an empty line after each event,
//! and `[DONE]` at the end. Comments and the other fields of an event are skipped; everything else
//! is refused.
// Reads replies that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use std::collections::VecDeque;

/// Longest line, and longest data of an event: far more than a chunk with one token needs.
const LINE_BYTES_MAX: usize = 1 << 20;

/// Fields of an event that say nothing about its text.
const SKIPPED: [&str; 3] = ["event", "id", "retry"];

/// One event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Event {
    Data(String),
    Done,
}

/// A stream that is none of these events.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum SseError {
    #[error("a line of the stream starts with {start:?}, expected data:")]
    Line { start: String },
    #[error("a line of the stream is not UTF-8")]
    Utf8,
    #[error("a line of the stream is longer than {LINE_BYTES_MAX} bytes")]
    TooLong,
    #[error("the stream goes on after [DONE]")]
    AfterDone,
    #[error("the stream ends without [DONE]")]
    NoDone,
}

/// A parser that takes a stream in pieces of any size.
#[derive(Debug, Default)]
pub(super) struct Parser {
    line: Vec<u8>,
    /// The data of the event whose empty line has not come.
    open: Option<String>,
    is_done: bool,
    events: VecDeque<Event>,
}

impl Parser {
    /// Takes the next bytes; [`Self::next`] returns the events that they complete.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Result<(), SseError> {
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            if self.line.len().saturating_add(part.len()) > LINE_BYTES_MAX {
                return Err(SseError::TooLong);
            }
            self.line.extend_from_slice(part);
            if let Some(line) = self.line.strip_suffix(b"\n") {
                let line = std::str::from_utf8(line).map_err(|_| SseError::Utf8)?;
                let line = line.strip_suffix('\r').unwrap_or(line).to_owned();
                self.line.clear();
                self.take(&line)?;
            }
        }
        Ok(())
    }

    pub(super) fn next(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Checks that the stream was whole.
    pub(super) fn finish(&self) -> Result<(), SseError> {
        if self.is_done && self.line.is_empty() { Ok(()) } else { Err(SseError::NoDone) }
    }

    fn take(&mut self, line: &str) -> Result<(), SseError> {
        if line.is_empty() {
            if let Some(data) = self.open.take() {
                let event = if data == "[DONE]" { Event::Done } else { Event::Data(data) };
                self.is_done |= event == Event::Done;
                self.events.push_back(event);
            }
            return Ok(());
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        if field.is_empty() || SKIPPED.contains(&field) {
            return Ok(());
        }
        if self.is_done {
            return Err(SseError::AfterDone);
        }
        if field != "data" {
            return Err(SseError::Line { start: line.chars().take(40).collect() });
        }
        let value = value.strip_prefix(' ').unwrap_or(value);
        match &mut self.open {
            // Lines of one event are lines of its data.
            Some(data) if data.len().saturating_add(value.len()) < LINE_BYTES_MAX => {
                data.push('\n');
                data.push_str(value);
            }
            Some(_) => return Err(SseError::TooLong),
            None => self.open = Some(value.to_owned()),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = ": hello\n\ndata: {\"a\": \"ä\"}\r\n\r\ndata:{}\n\n\ndata: [DONE]\n\n";

    /// Returns all events of a stream that comes in these pieces.
    fn events<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Result<Vec<Event>, SseError> {
        let (mut parser, mut events) = (Parser::default(), Vec::new());
        for piece in pieces {
            parser.push(piece)?;
            events.extend(std::iter::from_fn(|| parser.next()));
        }
        parser.finish().map(|()| events)
    }

    #[test]
    fn pieces_of_any_size_are_the_same_stream() {
        let data = |text: &str| Event::Data(text.to_owned());
        let expected = [data("{\"a\": \"ä\"}"), data("{}"), Event::Done];
        for size in 1..=STREAM.len() {
            assert_eq!(events(STREAM.as_bytes().chunks(size)).expect("a stream"), expected);
        }
    }

    #[test]
    fn an_event_comes_with_its_empty_line() {
        let mut parser = Parser::default();
        parser.push(b"data: 1\n").expect("half");
        assert_eq!(parser.next(), None);
        parser.push(b"\n").expect("whole");
        assert_eq!(parser.next(), Some(Event::Data("1".to_owned())));
        assert_eq!(parser.next(), None);
    }

    #[test]
    fn other_fields_of_an_event_are_skipped() {
        let stream = b"retry: 10\nevent: message\nid: 1\ndata: {}\n\nid\n\nevent: done\n\
            data: [DONE]\nid: 2\n\nid: 3\n\n";
        let expected = [Event::Data("{}".to_owned()), Event::Done];
        assert_eq!(events([&stream[..]]).expect("a stream"), expected);
        let lines = b"data: {\ndata:  \"a\": 1\ndata\ndata: }\n\ndata: [DONE]\n\n";
        let expected = [Event::Data("{\n \"a\": 1\n\n}".to_owned()), Event::Done];
        assert_eq!(events([&lines[..]]).expect("a stream"), expected);
    }

    #[test]
    fn everything_else_is_refused() {
        for (stream, error) in [
            (&b"{}\n\n"[..], SseError::Line { start: "{}".to_owned() }),
            (b"data: \xff\n\n", SseError::Utf8),
            (b"data: [DONE]\n\ndata: 1\n\n", SseError::AfterDone),
            (b"data: 1\n\n", SseError::NoDone),
            (b"data: [DONE]\n", SseError::NoDone),
            (b"data: [DONE]\n\nx", SseError::NoDone),
            (b"", SseError::NoDone),
        ] {
            assert_eq!(events([stream]), Err(error), "{}", String::from_utf8_lossy(stream));
        }
        let long = vec![b'x'; LINE_BYTES_MAX + 1];
        assert_eq!(events([&long[..]]), Err(SseError::TooLong));
        assert_eq!(events(long.chunks(1000)), Err(SseError::TooLong));
        let lines = format!("data: {}\n", "x".repeat(LINE_BYTES_MAX / 2)).repeat(3);
        assert_eq!(events([lines.as_bytes()]), Err(SseError::TooLong));
    }
}
