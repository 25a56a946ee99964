//! Finds the vector files under a directory.
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use super::{
    Found, Job, Kind, quant, te_convert, te_errors, te_quirks, te_rope, te_trace, vllm, vllm_fuzz,
};

/// Folders deeper than this are taken for a loop of links.
const DEPTH_MAX: usize = 16;

/// Finds every vector under `dir`; a directory without any counts as a failure.
pub(super) fn find(dir: &Path) -> Vec<Found> {
    let mut found = Vec::new();
    walk(dir, dir, 0, &mut found);
    if found.is_empty() {
        let why = format!("{}: no vector file in it", dir.display());
        found.push(Found::Bad { name: String::new(), why });
    }
    found
}

fn walk(root: &Path, dir: &Path, depth: usize, found: &mut Vec<Found>) {
    let entries = fs::read_dir(dir).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let mut entries: Vec<PathBuf> = match entries {
        Ok(entries) if depth <= DEPTH_MAX => {
            entries.into_iter().map(|entry| entry.path()).collect()
        }
        Ok(_) => return found.push(bad(root, dir, "folders too deep")),
        Err(error) => return found.push(bad(root, dir, error)),
    };
    entries.sort();
    for path in entries {
        if path.is_dir() {
            walk(root, &path, depth + 1, found);
        } else {
            file(root, &path, found);
        }
    }
}

fn name(root: &Path, path: &Path) -> String {
    let below = path.strip_prefix(root).unwrap_or(path);
    below.components().map(|part| part.as_os_str().to_string_lossy()).collect::<Vec<_>>().join("/")
}

fn bad(root: &Path, path: &Path, why: impl std::fmt::Display) -> Found {
    Found::Bad { name: name(root, path), why: format!("{}: {why}", path.display()) }
}

fn file(root: &Path, path: &Path, found: &mut Vec<Found>) {
    let title = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let extension = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
    let result = match extension.as_str() {
        "py" | "pyc" | "md" => return,
        _ if title.starts_with('.')
            || title.starts_with("readme")
            || title.starts_with("license") =>
        {
            return;
        }
        "json" => json(root, path),
        "safetensors" => safetensors(root, path),
        "csv" => csv(root, path, &title),
        // Raw data that `meta.json` beside it describes.
        "f16" if path.with_file_name("meta.json").is_file() => return,
        _ => Err("a file of an unknown kind".to_owned()),
    };
    match result {
        Ok(list) => found.extend(list),
        Err(why) => found.push(bad(root, path, why)),
    }
}

/// Reads a CSV file, which carries no schema; its header tells its kind.
fn csv(root: &Path, path: &Path, title: &str) -> Result<Vec<Found>, String> {
    let bytes = fs::read(path).map_err(|error| error.to_string())?;
    Ok(trials(root, path, quant::read_csv(title, &bytes)?))
}

/// Makes the trials of one file.
fn trials(root: &Path, path: &Path, list: Vec<quant::Trial>) -> Vec<Found> {
    let one = |(part, content): quant::Trial| {
        let below =
            |text: &str| part.as_ref().map_or(String::new(), |part| format!("{text}{part}"));
        let name = format!("{}{}", name(root, path), below("/"));
        let file = format!("{}{}", path.display(), below(", "));
        match content {
            quant::Content::Run(quant) => {
                Found::Vector { name, job: Arc::new(Job { file, kind: Kind::Quant(quant) }) }
            }
            quant::Content::Skip(why) => Found::Skipped { name, why },
            quant::Content::Bad(why) => Found::Bad { name, why: format!("{file}: {why}") },
        }
    };
    list.into_iter().map(one).collect()
}

fn json(root: &Path, path: &Path) -> Result<Vec<Found>, String> {
    let text = fs::read(path).map_err(|error| error.to_string())?;
    let value: Value =
        serde_json::from_slice(&text).map_err(|error| format!("no JSON: {error}"))?;
    let schema = value.get("schema").and_then(Value::as_str).unwrap_or_default().to_owned();
    if let Some(list) = quant::read_json(&schema, path, &value) {
        return Ok(trials(root, path, list?));
    }
    let file = name(root, path);
    let whole = |kind| {
        let job = Arc::new(Job { file: path.display().to_string(), kind });
        vec![Found::Vector { name: file.clone(), job }]
    };
    match schema.as_str() {
        "te-trace/1" => Ok(whole(Kind::TeTrace(parse::<te_trace::Trace>(value)?))),
        "vllm-scenario/1" => Ok(whole(Kind::VllmScenario(parse::<vllm::Scenario>(value)?))),
        "vllm-fuzz/1" => Ok(whole(Kind::VllmFuzz(parse::<vllm_fuzz::Run>(value)?))),
        "te-convert/1" => Ok(whole(Kind::TeConvert(parse::<te_convert::ConvertCase>(value)?))),
        "te-errors/1" => {
            each(root, path, value, |case| parse::<te_errors::ErrorCase>(case).map(Kind::TeError))
        }
        "te-quirks/1" => {
            each(root, path, value, |case| parse::<te_quirks::Quirk>(case).map(Kind::TeQuirk))
        }
        "te-rope/1" => {
            each(root, path, value, |case| parse::<te_rope::RopeCase>(case).map(Kind::TeRope))
        }
        "" => Err("a JSON file without a schema".to_owned()),
        other => Err(format!("a file of an unknown schema {other:?}")),
    }
}

fn parse<T: serde::de::DeserializeOwned>(value: Value) -> Result<T, String> {
    serde_json::from_value(value).map_err(|error| format!("does not fit its schema: {error}"))
}

/// Makes one job per entry of `cases`; an entry that cannot be read fails alone.
fn each(
    root: &Path,
    path: &Path,
    mut value: Value,
    read: impl Fn(Value) -> Result<Kind, String>,
) -> Result<Vec<Found>, String> {
    let cases = value.get_mut("cases").and_then(Value::as_array_mut).map(std::mem::take);
    let cases = cases.ok_or("does not fit its schema: no list of cases")?;
    if cases.is_empty() {
        return Err("does not fit its schema: the list of cases is empty".to_owned());
    }
    let one = |(index, case): (usize, Value)| {
        let title = case.get("name").and_then(Value::as_str).map(str::to_owned);
        let title = title.unwrap_or_else(|| index.to_string());
        let name = format!("{}/{title}", name(root, path));
        match read(case) {
            Ok(kind) => {
                let file = format!("{}, case {title}", path.display());
                Found::Vector { name, job: Arc::new(Job { file, kind }) }
            }
            Err(why) => {
                Found::Bad { name, why: format!("{}, case {title}: {why}", path.display()) }
            }
        }
    };
    Ok(cases.into_iter().enumerate().map(one).collect())
}

fn safetensors(root: &Path, path: &Path) -> Result<Vec<Found>, String> {
    let bytes = fs::read(path).map_err(|error| error.to_string())?;
    let (_, header) = ::safetensors::SafeTensors::read_metadata(&bytes)
        .map_err(|error| format!("not a safetensors file: {error}"))?;
    let schema = header.metadata().as_ref().and_then(|metadata| metadata.get("schema"));
    match schema.map(String::as_str) {
        Some("attention-case/1") => {
            let kind = Kind::Attention(path.to_owned());
            let job = Arc::new(Job { file: path.display().to_string(), kind });
            Ok(vec![Found::Vector { name: name(root, path), job }])
        }
        Some(schema) => Err(format!("a file of an unknown schema {schema:?}")),
        None => Err("a safetensors file without a schema".to_owned()),
    }
}
