//! The prompt of a chat, by the template that comes with a model.
mod find;
mod generation;
mod jinja;
mod json;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::Context;
use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind};
use serde::Serialize;

use crate::args::ServeArgs;
use crate::failure;
use crate::loaded::Loaded;
use jinja::Clock;

/// The chat template of a model. One that does not work costs the chats, and not the server.
#[derive(Debug)]
pub(super) enum ChatTemplate {
    /// The model has none.
    Missing,
    /// It has one that does not work, for this reason.
    Broken(String),
    /// It has one.
    Ready(Box<Template>),
}

/// A parsed template, with the tokens that it names.
#[derive(Debug)]
pub(super) struct Template {
    environment: Environment<'static>,
    tokens: BTreeMap<String, String>,
}

/// A message of a chat.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Message {
    pub(super) role: String,
    pub(super) content: String,
}

/// Messages of which a template makes no prompt.
#[derive(Debug, thiserror::Error)]
pub(super) enum TemplateError {
    /// The template refuses these messages, or fails on them.
    #[error("{}", failure::chain(.0))]
    Messages(Error),
    /// The template uses features that this engine lacks: it fails on all messages, or on most.
    #[error("the chat template is not supported: {}", failure::chain(.0))]
    Unsupported(Error),
}

const NAME: &str = "chat";

impl ChatTemplate {
    /// Reads the template of a model.
    ///
    /// # Errors
    /// A file of the command line that is not there.
    pub(super) fn find(args: &ServeArgs, loaded: &Loaded) -> anyhow::Result<Self> {
        if let Some(path) = &args.chat_template {
            std::fs::metadata(path).with_context(|| path.display().to_string())?;
        }
        Ok(match find::find(args, loaded) {
            Ok(None) => Self::Missing,
            Ok(Some(found)) => {
                let clock: Clock = Arc::new(|| chrono::Local::now().naive_local());
                match Template::parse(&found.source, found.tokens, clock) {
                    Ok(template) => Self::Ready(Box::new(template)),
                    Err(error) => Self::Broken(format!("{}: {error}", found.place)),
                }
            }
            Err(error) => Self::Broken(failure::describe(&error)),
        })
    }
}

impl Template {
    /// Parses a template, and tries it on a first message.
    ///
    /// # Errors
    /// A syntax error, and what this engine does not have.
    fn parse(
        source: &str,
        tokens: BTreeMap<String, String>,
        clock: Clock,
    ) -> Result<Self, TemplateError> {
        let environment = jinja::environment(NAME, source, clock);
        let template =
            Self { environment: environment.map_err(TemplateError::Unsupported)?, tokens };
        let first = Message { role: "user".to_owned(), content: "Hello".to_owned() };
        match template.prompt(&[first]) {
            Err(error @ TemplateError::Unsupported(_)) => Err(error),
            // It may want other messages than this one.
            Ok(_) | Err(TemplateError::Messages(_)) => Ok(template),
        }
    }

    /// Makes the prompt, which ends where the answer begins.
    ///
    /// # Errors
    /// The template's message about these messages.
    pub(super) fn prompt(&self, messages: &[Message]) -> Result<String, TemplateError> {
        self.render(messages, true)
    }

    /// Makes the text of messages alone, without the beginning of an answer; `None` if the template
    /// refuses them.
    pub(super) fn history(&self, messages: &[Message]) -> Option<String> {
        self.render(messages, false).ok()
    }

    fn render(&self, messages: &[Message], with_answer: bool) -> Result<String, TemplateError> {
        let mut names: BTreeMap<&str, Value> =
            self.tokens.iter().map(|(name, text)| (name.as_str(), Value::from(&**text))).collect();
        names.insert("messages", Value::from(minijinja::value::Serde(messages)));
        names.insert("add_generation_prompt", Value::from(with_answer));
        // There, but none, as transformers has them.
        names.insert("tools", Value::from(()));
        names.insert("documents", Value::from(()));
        let template = self.environment.get_template(NAME);
        let rendered = template.and_then(|template| template.render(Value::from(names)));
        rendered.map_err(|error| match error.kind() {
            ErrorKind::SyntaxError
            | ErrorKind::UnknownFilter
            | ErrorKind::UnknownFunction
            | ErrorKind::UnknownMethod
            | ErrorKind::UnknownTest
            | ErrorKind::TemplateNotFound => TemplateError::Unsupported(error),
            _ => TemplateError::Messages(error),
        })
    }
}
