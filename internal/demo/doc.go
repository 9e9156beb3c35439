// Package demo brings a lab up, proves on it what Pilaster claims, and takes it down again. Every
// line it prints was measured in that run and can fail.
package demo
