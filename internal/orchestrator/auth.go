package orchestrator

import (
	"context"
	"errors"
	"net/http"
	"time"

	"connectrpc.com/connect"

	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/orchestrator/pki"
)

type contextKey int

const (
	callerKey contextKey = iota
	instanceKey
	controllerKey
)

// maxStranger is how much of a request is read from who shows no certificate, in bytes: a Join has
// about 500.
const maxStranger = 64 << 10

// authenticate lets through who shows a node's certificate, and anybody to the calls that need
// none. TLS has verified the certificate already.
func authenticate(next http.Handler) http.Handler {
	open := map[string]bool{
		pilasterv1connect.NodeServiceJoinProcedure: true, // needs the join token
		"/healthz": true,
		"/readyz":  true,
	}
	errorWriter := connect.NewErrorWriter()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx := context.WithValue(r.Context(), controllerKey, http.NewResponseController(w))
		if r.TLS != nil && len(r.TLS.VerifiedChains) > 0 {
			if n, err := pki.NodeOf(r.TLS.VerifiedChains[0][0]); err == nil {
				ctx = context.WithValue(ctx, callerKey, n)
			}
		}
		ctx = context.WithValue(ctx, instanceKey, r.Header.Get(join.InstanceHeader))
		_, known := caller(ctx)
		if !known {
			r.Body = http.MaxBytesReader(w, r.Body, maxStranger)
			http.NewResponseController(w).SetReadDeadline(time.Now().Add(callTimeout))
		}
		if !known && !open[r.URL.Path] {
			err := connect.NewError(connect.CodeUnauthenticated, errors.New("this call needs a node certificate; join first"))
			if errorWriter.IsSupported(r) {
				errorWriter.Write(w, r, err)
			} else {
				http.Error(w, err.Message(), http.StatusUnauthorized)
			}
			return
		}
		next.ServeHTTP(w, r.WithContext(ctx))
	})
}

// caller is the node that makes the call.
func caller(ctx context.Context) (pki.Node, bool) {
	n, ok := ctx.Value(callerKey).(pki.Node)
	return n, ok
}

// instance is the process of the agent that makes the call.
func instance(ctx context.Context) string {
	s, _ := ctx.Value(instanceKey).(string)
	return s
}

// controller sets deadlines on the call's reads and writes.
func controller(ctx context.Context) *http.ResponseController {
	return ctx.Value(controllerKey).(*http.ResponseController)
}
