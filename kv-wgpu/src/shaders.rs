//! WGSL sources, assembled from files.
//!
//! WGSL cannot include files or compile parts conditionally. Lines that begin with `//!` are
//! commands of this preprocessor:
//!
//! ```text
//! //! if FLAG                        the lines up to `else` or `end` are kept if the flag is set
//! //! else                           the lines up to `end` are kept if it is not
//! //! else
//! //! end
//! ```
//!
//! Other specialisation uses WGSL's `override` constants.
#[cfg(test)]
mod grammar;
#[cfg(test)]
mod tests;

/// Every file of the folder `shaders`.
const FILES: &[(&str, &str)] = &[
    ("bytes.wgsl", include_str!("../shaders/bytes.wgsl")),
    ("convert.wgsl", include_str!("../shaders/convert.wgsl")),
    ("entries.wgsl", include_str!("../shaders/entries.wgsl")),
    ("numbers.wgsl", include_str!("../shaders/numbers.wgsl")),
    ("neighbours.wgsl", include_str!("../shaders/neighbours.wgsl")),
    ("pad.wgsl", include_str!("../shaders/pad.wgsl")),
    ("params.wgsl", include_str!("../shaders/params.wgsl")),
    ("reader.wgsl", include_str!("../shaders/reader.wgsl")),
    ("writer.wgsl", include_str!("../shaders/writer.wgsl")),
    ("codes.wgsl", include_str!("../shaders/codes.wgsl")),
    ("format.wgsl", include_str!("../shaders/format.wgsl")),
    ("gather.wgsl", include_str!("../shaders/gather.wgsl")),
    ("rows.wgsl", include_str!("../shaders/rows.wgsl")),
    ("transform.wgsl", include_str!("../shaders/transform.wgsl")),
    ("copy.wgsl", include_str!("../shaders/copy.wgsl")),
    ("encode.wgsl", include_str!("../shaders/encode.wgsl")),
    ("encode_lloyd.wgsl", include_str!("../shaders/encode_lloyd.wgsl")),
    ("butterflies.wgsl", include_str!("../shaders/butterflies.wgsl")),
    ("exchange.wgsl", include_str!("../shaders/exchange.wgsl")),
    ("head.wgsl", include_str!("../shaders/head.wgsl")),
    ("nearest.wgsl", include_str!("../shaders/nearest.wgsl")),
    ("new_row.wgsl", include_str!("../shaders/new_row.wgsl")),
    ("row_words.wgsl", include_str!("../shaders/row_words.wgsl")),
    ("stored_params.wgsl", include_str!("../shaders/stored_params.wgsl")),
    ("store_rows.wgsl", include_str!("../shaders/store_rows.wgsl")),
    ("load_rows.wgsl", include_str!("../shaders/load_rows.wgsl")),
    ("pack.wgsl", include_str!("../shaders/pack.wgsl")),
    ("coded_runs.wgsl", include_str!("../shaders/coded_runs.wgsl")),
    ("stage_tail.wgsl", include_str!("../shaders/stage_tail.wgsl")),
    ("write_blocks.wgsl", include_str!("../shaders/write_blocks.wgsl")),
    ("write.wgsl", include_str!("../shaders/write.wgsl")),
    ("attend.wgsl", include_str!("../shaders/attend.wgsl")),
    ("attend_few.wgsl", include_str!("../shaders/attend_few.wgsl")),
    ("attend_item.wgsl", include_str!("../shaders/attend_item.wgsl")),
    ("token.wgsl", include_str!("../shaders/token.wgsl")),
    ("attend_merge.wgsl", include_str!("../shaders/attend_merge.wgsl")),
    ("visible.wgsl", include_str!("../shaders/visible.wgsl")),
    ("stage.wgsl", include_str!("../shaders/stage.wgsl")),
    ("tiles.wgsl", include_str!("../shaders/tiles.wgsl")),
    ("write_params.wgsl", include_str!("../shaders/write_params.wgsl")),
];

/// Limit for the nesting of includes.
const DEPTH: u32 = 8;

/// Assembles the source of a shader with these flags; `Err` describes the mistake in a file.
pub(crate) fn source(name: &str, flags: &[&str]) -> Result<String, String> {
    let mut out = String::new();
    put(&mut out, name, (flags, &[]), DEPTH)?;
    Ok(out)
}

fn put(
    out: &mut String,
    name: &str,
    (flags, names): (&[&str], &[(&str, &str)]),
    depth: u32,
) -> Result<(), String> {
    let found = FILES.iter().find(|(file, _)| *file == name);
    let (_, text) = found.ok_or_else(|| format!("no shader is called {name}"))?;
    let depth = depth.checked_sub(1).ok_or_else(|| format!("{name} includes itself"))?;
    // One flag for each open `if`: whether its lines are kept.
    let mut inside: Vec<bool> = Vec::new();
    for (line, number) in text.lines().zip(1..) {
        let wrong = |what: &str| format!("{name}:{number}: {what}");
        let Some(command) = line.trim_start().strip_prefix("//!") else {
            if inside.iter().all(|is_in| *is_in) {
                replace(out, line, names);
                out.push('\n');
            }
            continue;
        };
        let mut words = command.split_whitespace();
        match (words.next(), words.next()) {
            (Some("if"), Some(flag)) => inside.push(flags.contains(&flag)),
            (Some("else"), None) => {
                let last = inside.last_mut().ok_or_else(|| wrong("`else` without `if`"))?;
                *last = !*last;
            }
            (Some("end"), None) => {
                inside.pop().ok_or_else(|| wrong("`end` without `if`"))?;
            }
            (Some("include"), Some(file)) => {
                if inside.iter().all(|is_in| *is_in) {
                    let given: Option<Vec<_>> = words.map(|word| word.split_once('=')).collect();
                    let given = given.ok_or_else(|| wrong("`include FILE name=value ..`"))?;
                    put(out, file, (flags, &given), depth)?;
                }
            }
            _ => return Err(wrong("unknown command")),
        }
    }
    if inside.is_empty() { Ok(()) } else { Err(format!("{name}: `if` without `end`")) }
}

fn replace(out: &mut String, line: &str, names: &[(&str, &str)]) {
    let mut line = line.to_owned();
    for (name, value) in names {
        line = line.replace(&format!("${name}"), value);
    }
    out.push_str(&line);
}
