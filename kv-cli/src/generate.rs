//! `kv generate`: prints text as it is generated, and a report at the end.
use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kv::engine::{Event, Finish, Generated};
use kv_runner::TextStream;

use crate::args::GenerateArgs;
use crate::job::{self, Job, Variant};
use crate::num::to_u64;
use crate::output;
use crate::report::Report;

pub(crate) fn run(args: &GenerateArgs) -> anyhow::Result<()> {
    let job = Job::open(args)?;
    if args.compare {
        return crate::compare::run(args, &job);
    }
    let layout = if args.contiguous { job.contiguous(args) } else { job.paged(args)? };
    let variant = Variant::new(args, layout);
    let mut show = Show::new(args, &job, &variant);
    let run = job.run(args, &variant, job.prompt_ids(), &mut show)?;
    show.end();
    let report = Report::new(args, &job, &variant, &run)?;
    if args.json {
        return output::json(&report);
    }
    output::text(&format!("\n{}", report.show()))
}

/// Output during a run: the text of one prompt as it is generated, or the finished texts of several
/// prompts, with a progress bar on a terminal.
struct Show<'s> {
    job: &'s Job,
    stop: Vec<u32>,
    is_json: bool,
    streams: Vec<(TextStream, String)>,
    bar: Option<ProgressBar>,
}

impl<'s> Show<'s> {
    fn new(args: &GenerateArgs, job: &'s Job, variant: &Variant) -> Self {
        let streams = job.prompts.iter().map(|prompt| TextStream::after(&prompt.ids));
        let is_streaming = job.prompts.len() == 1 && !args.json;
        let total = u64::from(variant.max_new_tokens) * to_u64(job.prompts.len());
        let has_bar = !is_streaming && std::io::stderr().is_terminal();
        let bar = has_bar.then(|| {
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
            let style = ProgressStyle::with_template("{bar:40} {pos}/{len} tokens, {per_sec}");
            bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        Self {
            job,
            stop: job.stop(variant),
            is_json: args.json,
            streams: streams.map(|stream| (stream, String::new())).collect(),
            bar,
        }
    }

    fn is_streaming(&self) -> bool {
        self.streams.len() == 1 && !self.is_json
    }

    fn token(&mut self, index: usize, token: u32) -> anyhow::Result<()> {
        if let Some(bar) = &self.bar {
            bar.inc(1);
        }
        let is_streaming = self.is_streaming();
        let Some((stream, text)) = self.streams.get_mut(index).filter(|_| !self.is_json) else {
            return Ok(());
        };
        if self.stop.contains(&token) {
            return Ok(());
        }
        let piece = stream.push(&self.job.loaded.tokenizer, token)?;
        if is_streaming {
            return output::text(&piece);
        }
        text.push_str(&piece);
        Ok(())
    }

    fn finished(&mut self, index: usize, generated: &Generated) -> anyhow::Result<()> {
        let is_streaming = self.is_streaming();
        let parts = self.streams.get_mut(index).zip(self.job.prompts.get(index));
        let Some(((stream, text), prompt)) = parts.filter(|_| !self.is_json) else {
            return Ok(());
        };
        let rest = stream.finish(&self.job.loaded.tokenizer)?;
        if is_streaming {
            return output::text(&format!("{rest}\n"));
        }
        let why = match generated.finish {
            Finish::Length => "",
            Finish::Stop => " [end of text]",
            Finish::Context => " [end of context]",
            Finish::Cancelled => " [cancelled]",
        };
        let number = index + 1;
        let text = format!("[{number}] {}{text}{rest}{why}\n", prompt.text);
        match &self.bar {
            Some(bar) => bar.suspend(|| output::text(&text)),
            None => output::text(&text),
        }
    }

    fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl job::Show for Show<'_> {
    fn begin(&mut self) -> anyhow::Result<()> {
        match self.job.prompts.as_slice() {
            [prompt] if !self.is_json => output::text(&prompt.text),
            _ => Ok(()),
        }
    }

    fn event(&mut self, event: &Event) -> anyhow::Result<()> {
        match event {
            Event::Token { index, token } => self.token(*index, *token),
            Event::Finished { index, generated } => self.finished(*index, generated),
            // There are no other events yet.
            _ => Ok(()),
        }
    }
}
