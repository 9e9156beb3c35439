// Package demo starts a lab, checks in it what Pilaster promises, and removes the lab. Each line that it prints is the
// result of a measurement in this run that can fail.
package demo
