package cniserver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"time"

	"github.com/containernetworking/cni/pkg/types"
)

// maxCall is the limit of a request in bytes. A GC that lists the attachments of a full node is far smaller.
const maxCall = 32 << 20

// Handler serves requests of pilaster-cni to /cni. The response's header Pilaster-Exit is the plugin's exit code.
// Handler calls done after each call, with its verb, the CNI error code or 0, and its duration.
func Handler(agent Agent, log *slog.Logger, done func(verb string, code uint, took time.Duration)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		start, code, exit := time.Now(), uint(0), 0
		var c call
		var answer bytes.Buffer
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxCall))
		if err != nil {
			err = types.NewError(types.ErrIOFailure, "reading the plugin's request failed", err.Error())
		} else {
			c, err = serve(r.Context(), plugin{agent, log}, body, &answer)
		}
		if err != nil {
			e := asCNI(err)
			code, exit = e.Code, 1
			answer.Reset()
			json.NewEncoder(&answer).Encode(e)
		}
		done(c.verb, code, time.Since(start))
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Content-Length", strconv.Itoa(answer.Len()))
		w.Header().Set("Pilaster-Exit", strconv.Itoa(exit))
		w.Write(answer.Bytes())
	})
}

func serve(ctx context.Context, p plugin, body []byte, stdout io.Writer) (call, error) {
	c, refused := parseCall(body)
	if refused != nil { // a nil *types.Error is not a nil error
		return c, refused
	}
	return c, p.run(ctx, c, stdout)
}

func asCNI(err error) *types.Error {
	var e *types.Error
	if errors.As(err, &e) {
		return e
	}
	return types.NewError(types.ErrInternal, err.Error(), "")
}
