#!/bin/sh
# Chromium for tests/test_report_in_browser.py, where it can be had: else that test is skipped, and says why.
for name in chromium chromium-browser google-chrome; do
  command -v "$name" >/dev/null && exit 0
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null && exit 0
  echo "Chromium could not be installed: the reports are not opened in a browser"
else
  echo "Chromium is not here, and only root can install it with apt-get: the reports are not opened in a browser"
fi
