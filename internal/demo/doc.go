// Package demo starts a lab, verifies on it what Pilaster promises, and removes it. Each line that it prints was
// measured in that run and can fail.
package demo
