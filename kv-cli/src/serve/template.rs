//! The prompt of a chat, by the template that comes with a model.
//!
//! Templates are written for Jinja in Python: they call methods of Python's strings and lists, and
//! expect that a block's own line leaves no trace.
use std::path::Path;

use anyhow::Context;
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, context};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::args::ServeArgs;
use crate::loaded::Loaded;

/// A parsed template, with the tokens that it names.
#[derive(Debug)]
pub(super) struct Template {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

/// A message of a chat.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Message {
    pub(super) role: String,
    pub(super) content: String,
}

const NAME: &str = "chat";

/// What `tokenizer_config.json` says about templates.
#[derive(Debug, Default, Deserialize)]
struct TokenizerConfig {
    chat_template: Option<Value>,
    bos_token: Option<Value>,
    eos_token: Option<Value>,
}

impl Template {
    /// Reads the template of a model; `None` if it has none.
    pub(super) fn find(args: &ServeArgs, loaded: &Loaded) -> anyhow::Result<Option<Self>> {
        let folder_of = |path: &Path| {
            if path.is_dir() { Some(path.to_owned()) } else { path.parent().map(Path::to_owned) }
        };
        let of_tokenizer = args.engine.tokenizer.as_deref().and_then(folder_of);
        let folders: Vec<_> = of_tokenizer.into_iter().chain(folder_of(&loaded.path)).collect();
        let mut config = TokenizerConfig::default();
        for folder in &folders {
            let path = folder.join("tokenizer_config.json");
            if path.is_file() {
                let text = std::fs::read(&path).with_context(|| path.display().to_string())?;
                config =
                    serde_json::from_slice(&text).with_context(|| path.display().to_string())?;
                break;
            }
        }
        let beside = || folders.iter().map(|folder| folder.join("chat_template.jinja"));
        let file = args.chat_template.clone().or_else(|| beside().find(|path| path.is_file()));
        let (source, place) = match &file {
            Some(path) => {
                let place = path.display().to_string();
                (Some(std::fs::read_to_string(path).with_context(|| place.clone())?), place)
            }
            None => (default_template(config.chat_template.as_ref()), "chat_template".to_owned()),
        };
        let token = |token: &Option<Value>| token.as_ref().map(token_text).unwrap_or_default();
        let (bos, eos) = (token(&config.bos_token), token(&config.eos_token));
        source.map(|source| Self::parse(source, bos, eos).context(place)).transpose()
    }

    fn parse(source: String, bos: String, eos: String) -> Result<Self, Error> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
        environment.set_syntax(syntax);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| {
            Err::<String, _>(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_template_owned(NAME, source)?;
        Ok(Self { environment, bos, eos })
    }

    /// Makes the prompt, which ends where the answer begins.
    ///
    /// # Errors
    /// What the template says about these messages.
    pub(super) fn prompt(&self, messages: &[Message]) -> Result<String, Error> {
        self.environment.get_template(NAME)?.render(context! {
            messages => minijinja::value::Serde(messages),
            add_generation_prompt => true,
            bos_token => &*self.bos,
            eos_token => &*self.eos,
        })
    }
}

/// Returns the template of a text, or the default one of a list of named ones.
fn default_template(given: Option<&Value>) -> Option<String> {
    match given? {
        Value::String(source) => Some(source.clone()),
        Value::Array(named) => {
            let is_default =
                |entry: &&Value| entry.get("name").is_some_and(|name| name == "default");
            let entry = named.iter().find(is_default).or_else(|| named.first())?;
            entry.get("template")?.as_str().map(str::to_owned)
        }
        _ => None,
    }
}

/// Returns the text of a special token, which may be an object with more about it.
fn token_text(token: &Value) -> String {
    let text = token.as_str().or_else(|| token.get("content")?.as_str());
    text.unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn message(role: &str, content: &str) -> Message {
        Message { role: role.to_owned(), content: content.to_owned() }
    }

    fn render(source: &str, messages: &[Message]) -> Result<String, Error> {
        Template::parse(source.to_owned(), "<s>".to_owned(), "</s>".to_owned())?.prompt(messages)
    }

    #[test]
    fn blocks_leave_no_lines_and_methods_of_python_work() {
        let source = "{{ bos_token }}\n{% for message in messages %}\n  \
            {%- if message['role'].startswith('s') %}\n[{{ message.content.strip().upper() }}]\n  \
            {%- else %}\n<{{ message['role'] }}>{{ message['content'] | trim }}{{ eos_token }}\n\
            {% endif %}\n{% endfor %}\n{% if add_generation_prompt %}\n<assistant>{% endif %}";
        let messages = [message("system", " be brief "), message("user", "hi")];
        let prompt = render(source, &messages).expect("renders");
        assert!(prompt.starts_with("<s>\n"), "{prompt:?}");
        assert!(prompt.contains("[BE BRIEF]"), "{prompt:?}");
        assert!(prompt.contains("<user>hi</s>"), "{prompt:?}");
        assert!(prompt.ends_with("<assistant>"), "{prompt:?}");
        assert!(!prompt.contains("  "), "{prompt:?}");
    }

    #[test]
    fn a_template_may_refuse_messages() {
        let source = "{% if messages | length > 1 %}{{ raise_exception('one only') }}{% endif %}ok";
        assert_eq!(render(source, &[message("user", "a")]).expect("renders"), "ok");
        let refused = render(source, &[message("user", "a"), message("user", "b")]);
        assert!(refused.expect_err("refused").to_string().contains("one only"));
        assert!(render("{% for %}", &[]).is_err());
    }

    #[test]
    fn templates_and_tokens_come_in_several_shapes() {
        assert_eq!(default_template(Some(&json!("x"))).as_deref(), Some("x"));
        let named = json!([{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]);
        assert_eq!(default_template(Some(&named)).as_deref(), Some("d"));
        assert_eq!(default_template(Some(&json!(3))), None);
        assert_eq!(default_template(None), None);
        assert_eq!(token_text(&json!({"content": "<s>", "lstrip": false})), "<s>");
        assert_eq!(token_text(&json!("<s>")), "<s>");
    }
}
