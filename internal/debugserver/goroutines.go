// Package debugserver serves the goroutines and the memory of a daemon over HTTP.
package debugserver

import (
	"net/http"
	"runtime/pprof"
)

// Goroutines serves the stack of each goroutine, with functions and lines only: the longer form shows arguments, and
// keys are among them.
func Goroutines(w http.ResponseWriter, _ *http.Request) {
	_ = pprof.Lookup("goroutine").WriteTo(w, 1)
}
