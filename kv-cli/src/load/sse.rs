//! Server-sent events as completions stream them: `data: ` lines, each with an empty line after it,
//! and `[DONE]` at the end. Comments are skipped; everything else is refused.
use std::collections::VecDeque;

/// Longest line, far more than a chunk with one token needs.
const LINE_BYTES_MAX: usize = 1 << 20;

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
    #[error("an event of the stream has a second line, expected an empty one")]
    SecondLine,
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
    /// The event whose empty line has not come.
    open: Option<Event>,
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
            if let Some(event) = self.open.take() {
                self.is_done |= event == Event::Done;
                self.events.push_back(event);
            }
            return Ok(());
        }
        if line.starts_with(':') {
            return Ok(());
        }
        if self.is_done {
            return Err(SseError::AfterDone);
        }
        let Some(data) = line.strip_prefix("data:") else {
            return Err(SseError::Line { start: line.chars().take(40).collect() });
        };
        if self.open.is_some() {
            return Err(SseError::SecondLine);
        }
        let data = data.strip_prefix(' ').unwrap_or(data);
        let event = if data == "[DONE]" { Event::Done } else { Event::Data(data.to_owned()) };
        self.open = Some(event);
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
    fn everything_else_is_refused() {
        for (stream, error) in [
            (&b"data: 1\ndata: 2\n\n"[..], SseError::SecondLine),
            (b"event: x\n\n", SseError::Line { start: "event: x".to_owned() }),
            (b"{}\n\n", SseError::Line { start: "{}".to_owned() }),
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
    }
}
