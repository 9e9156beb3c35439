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

// VerifyNode checks a client certificate in the TLS handshake: this cluster's authority must have signed it for a node.
// It accepts a connection without a certificate, and a certificate outside its validity period: Authenticate decides
// per call what such a caller may do, and can return a reason.
func VerifyNode(authority *pki.Authority) func(tls.ConnectionState) error {
	return func(cs tls.ConnectionState) error {
		if len(cs.PeerCertificates) == 0 {
			return nil
		}
		return authority.VerifyNode(cs.PeerCertificates[0])
	}
}

// Authenticate accepts calls with a valid node certificate, and calls without one to the procedures that need none,
// within their limits. A certificate that has expired or is not valid yet permits its own renewal only.
func Authenticate(now func() time.Time, guard *CallLimiter, next http.Handler) http.Handler {
	open := map[string]bool{
		pilasterv1connect.NodeServiceJoinProcedure: true, // requires the join token
		"/healthz": true,
		"/readyz":  true,
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx := WithController(r.Context(), http.NewResponseController(w))
		ctx = context.WithValue(ctx, instanceKey, r.Header.Get(join.InstanceHeader))
		from, _ := source(r.RemoteAddr)
		by := client{from: from}
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

// refuse writes an error in the protocol of the request.
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

// peerNode reads the node of the peer certificate. It returns an error if the certificate is not valid now.
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
			"%w; it permits only its own renewal, which the node requests automatically: correct the clock if one is "+
				"wrong",
			err,
		)
	}
	return node, nil
}

// Caller returns the node that makes the call.
func Caller(ctx context.Context) (pki.Node, bool) {
	n, ok := ctx.Value(callerKey).(pki.Node)
	return n, ok
}

// ExpiredCaller returns the node of a certificate outside its validity period. Only Renew has one.
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

// Instance identifies the machine, from boot to shutdown, whose agent makes the call.
func Instance(ctx context.Context) string {
	s, _ := ctx.Value(instanceKey).(string)
	return s
}

// Controller returns the controller that sets deadlines for reads and writes of the call.
func Controller(ctx context.Context) *http.ResponseController {
	return ctx.Value(controllerKey).(*http.ResponseController)
}
