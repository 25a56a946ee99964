//! A caller's word about the return of a conversation.
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use kv_format::UnknownName;

/// What a caller expects of a sequence that ends: whether and when its tokens are continued.
///
/// A hint changes the order of eviction, and nothing else: it pins no block and refuses none. Its
/// text is the same wherever a hint is written.
///
/// ```
/// use std::time::Duration;
/// use kv::eviction::Return;
///
/// assert_eq!("tool-call".parse(), Ok(Return::ToolCall));
/// let soon = Return::Within(Duration::from_millis(1500));
/// assert_eq!(soon.to_string(), "within=1.5"); // seconds
/// assert_eq!("within=1.5".parse(), Ok(soon));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Return {
    /// The conversation is over.
    Ended,
    /// The next request of this conversation is expected after about this time.
    Within(Duration),
    /// The user reads and may or may not come back.
    Idle,
    /// A tool runs, and the sequence goes on when the tool has answered.
    ToolCall,
}

/// The text before the seconds of [`Return::Within`].
const WITHIN: &str = "within=";

impl fmt::Display for Return {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended => f.write_str("ended"),
            Self::Idle => f.write_str("idle"),
            Self::ToolCall => f.write_str("tool-call"),
            Self::Within(time) => {
                let digits = format!("{}.{:09}", time.as_secs(), time.subsec_nanos());
                write!(f, "{WITHIN}{}", digits.trim_end_matches('0').trim_end_matches('.'))
            }
        }
    }
}

impl FromStr for Return {
    type Err = UnknownName;
    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let plain = [Self::Ended, Self::Idle, Self::ToolCall];
        let within = || name.strip_prefix(WITHIN).and_then(seconds).map(Self::Within);
        let known = plain.into_iter().find(|hint| hint.to_string() == name).or_else(within);
        let names = "ended, idle, tool-call, within=SECONDS";
        known.ok_or_else(|| UnknownName::new("return hint", name, names))
    }
}

/// Reads decimal seconds with at most nine places, all that a [`Duration`] has.
fn seconds(text: &str) -> Option<Duration> {
    let (whole, places) = text.split_once('.').unwrap_or((text, "0"));
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    if !is_number(whole) || !is_number(places) || places.len() > 9 {
        return None;
    }
    Some(Duration::new(whole.parse().ok()?, format!("{places:0<9}").parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_read_as_written() {
        let within = |secs, nanos| Return::Within(Duration::new(secs, nanos));
        let hints = [
            (Return::Ended, "ended"),
            (Return::Idle, "idle"),
            (Return::ToolCall, "tool-call"),
            (within(30, 0), "within=30"),
            (within(0, 0), "within=0"),
            (within(100, 250_000_000), "within=100.25"),
            (within(u64::MAX, 1), "within=18446744073709551615.000000001"),
        ];
        for (hint, text) in hints {
            assert_eq!(hint.to_string(), text);
            assert_eq!(text.parse(), Ok(hint), "{text}");
        }
        assert_eq!("within=2.50".parse(), Ok(within(2, 500_000_000)));
    }

    #[test]
    fn other_texts_are_refused() {
        let wrong = ["", "Ended", "tool_call", "within", "within=", "within=-1", "within=1e3"];
        let more = ["within=1.", "within=.5", "within=30s", "within=NaN", "within=0.0000000001"];
        for text in wrong.into_iter().chain(more).chain(["within=18446744073709551616"]) {
            let refused = text.parse::<Return>().unwrap_err().to_string();
            assert!(refused.starts_with(&format!("unknown return hint {text:?}")), "{refused}");
        }
    }
}
