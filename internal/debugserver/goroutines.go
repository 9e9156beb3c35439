// Package debugserver serves what a daemon shows of itself over HTTP: its goroutines and its memory.
package debugserver

import (
	"net/http"
	"runtime/pprof"
)

// Goroutines tells what each goroutine is doing. Functions and lines only: the longer form shows their
// arguments, and keys are among them.
func Goroutines(w http.ResponseWriter, _ *http.Request) {
	_ = pprof.Lookup("goroutine").WriteTo(w, 1)
}
