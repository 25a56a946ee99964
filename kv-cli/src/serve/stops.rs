//! Lengths of a chat's prompt at which recurrent states are kept, because other prompts begin with
//! the same messages.
use super::Server;
use super::template::{Message, Template};
use crate::num::to_u32;

impl Server {
    /// Returns these lengths, ascending: the end of the system's message, with which other chats
    /// begin, and the end of the last message. After that a template begins the answer, and the
    /// next turn may begin it otherwise. None for a model without recurrent states.
    ///
    /// Tokens that span two messages move a length, which costs a hit and no more.
    pub(super) fn stops(
        &self,
        template: &Template,
        messages: &[Message],
        (prompt, tokens): (&str, &[u32]),
    ) -> Vec<u32> {
        if !self.has_states {
            return Vec::new();
        }
        let encode = |text: &str| {
            let encoded = self.tokenizer.encode(text, &self.config);
            encoded.map(|encoded| encoded.tokens).unwrap_or_default()
        };
        let is_system = |message: &&Message| message.role == "system";
        let system = messages.first().filter(is_system).filter(|_| messages.len() > 1);
        let begin = system.and_then(|system| template.history(std::slice::from_ref(system)));
        let begin = begin.filter(|begin| prompt.starts_with(begin));
        let begin = begin.map_or(0, |begin| common(encode(&begin).iter(), tokens.iter()));
        let history = template.history(messages);
        let answer = history.and_then(|history| prompt.strip_prefix(history.as_str()));
        let answer = answer.filter(|answer| !answer.is_empty());
        let answer =
            answer.map_or(0, |answer| common(encode(answer).iter().rev(), tokens.iter().rev()));
        let end = to_u32(tokens.len());
        let stops = [begin, if answer == 0 { 0 } else { end - answer }];
        let mut stops: Vec<_> = stops.into_iter().filter(|stop| (1..end).contains(stop)).collect();
        stops.sort_unstable();
        stops.dedup();
        stops
    }
}

/// Returns the length of the longest common beginning.
fn common<'a>(a: impl Iterator<Item = &'a u32>, b: impl Iterator<Item = &'a u32>) -> u32 {
    to_u32(a.zip(b).take_while(|(a, b)| a == b).count())
}
