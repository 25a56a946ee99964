//! The chat template of a model, and the special tokens that it may name.
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context;
use kv_runner::gguf;
use serde_json::{Map, Value};

use crate::args::ServeArgs;
use crate::loaded::Loaded;

/// The source of a template.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) source: String,
    /// The place of the template, for messages.
    pub(super) place: String,
    /// Texts of special tokens by the names that templates use, such as `bos_token`.
    pub(super) tokens: BTreeMap<String, String>,
}

/// Finds the template of a model; `None` if it has none. The first of these is taken: the file of
/// the command line, `chat_template.jinja`, `tokenizer_config.json`, the model's GGUF file. Files
/// beside the tokenizer come before those beside the model.
///
/// # Errors
/// A file that cannot be read, or is not what its name says.
pub(super) fn find(args: &ServeArgs, loaded: &Loaded) -> anyhow::Result<Option<Found>> {
    let folders = folders(args, loaded);
    let config = tokenizer_config(&folders)?;
    // A model is a folder or a GGUF file.
    let is_gguf = loaded.path.is_file();
    let of_model = is_gguf.then(|| gguf::Head::read(&loaded.path)).transpose()?;
    let tokens = match (&config, &of_model) {
        (Some((_, config)), _) => named_tokens(config),
        (None, Some(head)) => {
            let tokens = head.metadata().special_tokens();
            tokens.map(|(name, text)| (name.to_owned(), text.to_owned())).collect()
        }
        (None, None) => BTreeMap::new(),
    };
    let found = |source, place| Some(Found { source, place, tokens });
    let in_folder = || folders.iter().map(|folder| folder.join("chat_template.jinja"));
    let file = args.chat_template.clone().or_else(|| in_folder().find(|path| path.is_file()));
    if let Some(path) = file {
        let place = path.display().to_string();
        let source = kv_runner::read_text(&path)?;
        return Ok(found(source, place));
    }
    if let Some((path, config)) = &config
        && let Some(template) = config.get("chat_template").filter(|template| !template.is_null())
    {
        let place = format!("{}: chat_template", path.display());
        let source = default_template(template).with_context(|| format!("{place}: no text"))?;
        return Ok(found(source, place));
    }
    let Some(head) = of_model else { return Ok(None) };
    let place = loaded.path.display().to_string();
    let template = head.metadata().chat_template().with_context(|| place.clone())?;
    Ok(template.and_then(|(key, source)| found(source.to_owned(), format!("{place}: {key}"))))
}

/// Returns the folders that files of the tokenizer may be in.
fn folders(args: &ServeArgs, loaded: &Loaded) -> Vec<PathBuf> {
    let folder_of = |path: &Path| {
        if path.is_dir() { Some(path.to_owned()) } else { path.parent().map(Path::to_owned) }
    };
    let of_tokenizer = args.engine.model.tokenizer.as_deref().and_then(folder_of);
    of_tokenizer.into_iter().chain(folder_of(&loaded.path)).collect()
}

/// Reads the first `tokenizer_config.json`.
fn tokenizer_config(folders: &[PathBuf]) -> anyhow::Result<Option<(PathBuf, Map<String, Value>)>> {
    let mut paths = folders.iter().map(|folder| folder.join("tokenizer_config.json"));
    let Some(path) = paths.find(|path| path.is_file()) else { return Ok(None) };
    let text = kv_runner::read_text(&path)?;
    let config = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
    Ok(Some((path, config)))
}

/// Returns the special tokens that a `tokenizer_config.json` names.
fn named_tokens(config: &Map<String, Value>) -> BTreeMap<String, String> {
    let named = config.iter().filter(|(name, _)| name.ends_with("_token"));
    named.filter_map(|(name, token)| Some((name.clone(), token_text(token)?))).collect()
}

/// Returns the text of a special token, which may be an object with more about it.
fn token_text(token: &Value) -> Option<String> {
    token.as_str().or_else(|| token.get("content")?.as_str()).map(str::to_owned)
}

/// Returns the template of a text, or the default one of a list of named ones.
fn default_template(given: &Value) -> Option<String> {
    match given {
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn templates_and_tokens_come_in_several_shapes() {
        assert_eq!(default_template(&json!("x")).as_deref(), Some("x"));
        let named = json!([{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]);
        assert_eq!(default_template(&named).as_deref(), Some("d"));
        for nothing in [json!(3), json!([]), json!([{"name": "default"}]), json!({"a": "b"})] {
            assert_eq!(default_template(&nothing), None, "{nothing}");
        }
        let config = json!({
            "bos_token": {"content": "<s>", "lstrip": false}, "eos_token": "</s>",
            "pad_token": null, "add_bos_token": true, "model_max_length": 5,
        });
        let tokens = named_tokens(config.as_object().expect("an object"));
        let expected = [("bos_token", "<s>"), ("eos_token", "</s>")];
        assert_eq!(tokens, expected.map(|(name, text)| (name.to_owned(), text.to_owned())).into());
    }
}
