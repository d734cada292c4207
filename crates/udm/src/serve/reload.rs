//! The configuration file of a server: its devices at the start, and SIGHUP.

use super::shutdown::SighupStream;
use super::systemd;
use super::tls::reload_certificates;
use crate::log;
use crate::verbs::format_reconfigure_changes;
use anyhow::{Result, bail};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use udm_control::api::ReconfigureReport;
use udm_control::config::{self, ConfigReader, DesiredState};
use udm_control::verbs::{self, CancelToken};
use udm_control::{DeviceRegistry, error::VerbError};
use udm_frontends::nbd::NbdServerTls;

/// The content of a file at the start, and a function that reads the file again.
pub(super) type ReloadableConfig = (DesiredState, ConfigReader);

/// Time limit of changes after SIGHUP that wait for requests in flight; no user is present to
/// cancel them.
const PATIENCE: Duration = Duration::from_secs(60);

/// Creates the devices of a file in addition to those of the command line. Returns the names of all
/// devices in the file. Devices that cannot be created are logged; the next start or `udm
/// reconfigure` tries again.
pub(super) async fn create_config_file_devices(
    registry: &Arc<DeviceRegistry>,
    (desired_state, read): ReloadableConfig,
    given: &[&str],
) -> Result<Vec<String>> {
    if let Some(twice) = desired_state.devices.iter().find(|device| given.contains(&device.name.as_str())) {
        bail!("{}: --device and the file have it both", twice.name);
    }
    registry.set_config_reader(read);
    let done = config::create_declared_devices(registry, &desired_state).await?;
    let failed = done.changes.iter().filter_map(|change| Some((&change.name, change.error.as_ref()?)));
    failed.for_each(|(name, why)| log::queue_stderr_text(&format!("udm: {name}: {why}\n")));
    let absent = config::absent_devices(registry).await;
    if !absent.is_empty() {
        log::queue_stderr_text(&format!("udm: tried again until it can be created: {}\n", absent.join(", ")));
    }
    Ok(desired_state.devices.into_iter().map(|device| device.name).collect())
}

/// Reads the certificates and applies the file at each SIGHUP, and logs the changes.
pub(super) async fn reload_on_sighup(
    hangups: &SighupStream,
    registry: &Arc<DeviceRegistry>,
    has_file: bool,
    tls: Option<&NbdServerTls>,
) -> Infallible {
    loop {
        hangups.next().await;
        systemd::notify_systemd_reloading();
        tls.into_iter().for_each(reload_certificates);
        if !has_file {
            systemd::notify_systemd_ready(registry.all().len());
            continue;
        }
        let cancel_token = CancelToken::default();
        let (token, registry_clone) = (cancel_token.clone(), Arc::clone(registry));
        let mut change = tokio::task::spawn_blocking(move || {
            verbs::block_on_verb(config::apply_config_file(&registry_clone, false, &token))
        });
        let done = tokio::select! {
            done = &mut change => done,
            () = tokio::time::sleep(PATIENCE) => {
                cancel_token.cancel(verbs::interrupted_error(&format!("not done within {} s", PATIENCE.as_secs())));
                change.await
            }
        };
        match done {
            Ok(done) => log_reload_result(&done),
            Err(error) => tracing::error!("reconfigure: {error}"),
        }
        systemd::notify_systemd_ready(registry.all().len());
    }
}

/// Creates devices of the file that could not be created at first, because a snapshot could not be
/// attached or something was not there, and logs them.
pub(super) async fn create_waiting_devices(registry: &Arc<DeviceRegistry>) -> Infallible {
    let log_created = |done: &ReconfigureReport| {
        format_reconfigure_changes(done)
            .0
            .iter()
            .for_each(|line| log::queue_stderr_text(&format!("udm: {line}\n")));
    };
    config::run_config_device_retries(registry, log_created).await;
    std::future::pending().await
}

fn log_reload_result(done: &Result<ReconfigureReport, VerbError>) {
    match done {
        Ok(done) => {
            let (lines, refused) = format_reconfigure_changes(done);
            lines.iter().chain(&refused).for_each(|line| log::queue_stderr_text(&format!("udm: {line}\n")));
        }
        Err(error) => log::queue_stderr_text(&format!("udm: {error}\n")),
    }
}
