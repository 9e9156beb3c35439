package observe

import (
	"net/http"
	"runtime/pprof"
)

// Goroutines tells what each goroutine is doing. Functions and lines only: the longer form shows their
// arguments, and keys are among them.
func Goroutines(w http.ResponseWriter, _ *http.Request) {
	_ = pprof.Lookup("goroutine").WriteTo(w, 1)
}
