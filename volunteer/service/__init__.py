"""Running at login: a user unit of systemd, a LaunchAgent, a logon task of Windows."""
