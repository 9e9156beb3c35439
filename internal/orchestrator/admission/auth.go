package admission

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"time"

	"connectrpc.com/connect"

	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/unixrpc"
)

type contextKey int

const (
	callerKey contextKey = iota
	expiredKey
	instanceKey
	controllerKey
	connKey
	bodyKey
)

// VerifyNode accepts in the handshake what this cluster signed for a node, at whatever time, and no certificate
// at all: what one that is not valid now is good for, authenticate decides by the call, and tells why.
func VerifyNode(authority *pki.Authority) func(tls.ConnectionState) error {
	return func(cs tls.ConnectionState) error {
		if len(cs.PeerCertificates) == 0 {
			return nil
		}
		return authority.VerifyNode(cs.PeerCertificates[0])
	}
}

// Authenticate lets through who shows a node's certificate, and anybody to the calls that need
// none, within their limits. A certificate that ran out, or is not valid yet, is good for its own renewal
// and nothing else.
func Authenticate(now func() time.Time, guard *CallLimiter, next http.Handler) http.Handler {
	open := map[string]bool{
		pilasterv1connect.NodeServiceJoinProcedure: true, // needs the join token
		"/healthz": true,
		"/readyz":  true,
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx := WithController(r.Context(), http.NewResponseController(w))
		ctx = context.WithValue(ctx, instanceKey, r.Header.Get(join.InstanceHeader))
		by := client{from: source(r.RemoteAddr)}
		node, err := peerNode(r.TLS, now())
		switch {
		case err == nil:
			if err := connOf(ctx).identify(node); err != nil {
				w.Header().Set("Connection", "close")
				refuse(w, r, err)
				return
			}
			ctx, by = WithCaller(ctx, node), client{node: node}
		case open[r.URL.Path]:
		case node != pki.Node{} && r.URL.Path == pilasterv1connect.NodeServiceRenewProcedure:
			ctx, by = context.WithValue(ctx, expiredKey, node), client{node: node}
		default:
			refuse(w, r, connect.NewError(connect.CodeUnauthenticated, err))
			return
		}
		done, err := guard.admit(r, by)
		if err != nil {
			refuse(w, r, err)
			return
		}
		defer done()
		body := guard.limitBody(r, by)
		r = r.WithContext(context.WithValue(ctx, bodyKey, body))
		r.Body = body
		next.ServeHTTP(w, r)
	})
}

var errorWriter = connect.NewErrorWriter()

// Refuse answers in the protocol of the request.
func refuse(w http.ResponseWriter, r *http.Request, err error) {
	if errorWriter.IsSupported(r) {
		errorWriter.Write(w, r, err)
		return
	}
	status := http.StatusServiceUnavailable
	if connect.CodeOf(err) == connect.CodeUnauthenticated {
		status = http.StatusUnauthorized
	}
	http.Error(w, unixrpc.Words(err), status)
}

// peerNode is whose certificate was shown, with an error where it is not valid now.
func peerNode(state *tls.ConnectionState, now time.Time) (pki.Node, error) {
	none := errors.New("this call needs a node certificate; join first")
	if state == nil || len(state.PeerCertificates) == 0 {
		return pki.Node{}, none
	}
	cert := state.PeerCertificates[0]
	node, err := pki.NodeOf(cert)
	if err != nil {
		return pki.Node{}, none
	}
	if err := join.CheckTime(cert, now, "this orchestrator"); err != nil {
		return node, fmt.Errorf(
			"%w; it is good for nothing but its own renewal, which the node asks for by itself: set right the clock that is wrong, if one is",
			err,
		)
	}
	return node, nil
}

// Caller is the node that makes the call.
func Caller(ctx context.Context) (pki.Node, bool) {
	n, ok := ctx.Value(callerKey).(pki.Node)
	return n, ok
}

// ExpiredCaller is the node that the caller was while its certificate was valid. Only Renew has one.
func ExpiredCaller(ctx context.Context) (pki.Node, bool) {
	n, ok := ctx.Value(expiredKey).(pki.Node)
	return n, ok
}

// WithCaller returns a context of a call that a node makes.
func WithCaller(ctx context.Context, n pki.Node) context.Context {
	return context.WithValue(ctx, callerKey, n)
}

// WithController returns a context of a call with the controller of its connection.
func WithController(ctx context.Context, c *http.ResponseController) context.Context {
	return context.WithValue(ctx, controllerKey, c)
}

// Instance is the machine of the agent that makes the call.
func Instance(ctx context.Context) string {
	s, _ := ctx.Value(instanceKey).(string)
	return s
}

// Controller sets deadlines on the call's reads and writes.
func Controller(ctx context.Context) *http.ResponseController {
	return ctx.Value(controllerKey).(*http.ResponseController)
}
