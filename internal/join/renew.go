package join

import (
	"context"
	"fmt"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
)

// KeepCertificate renews the certificate when a third of its validity period is left, until ctx ends. It polls the
// clock instead of setting a timer, because the clock may be set meanwhile.
func (c *Client) KeepCertificate(ctx context.Context) error {
	const every = 10 * time.Minute
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		cert := c.current.Load().cert
		life := cert.NotAfter.Sub(cert.NotBefore)
		if c.config.Now().After(cert.NotAfter.Add(-life / 3)) {
			if err := c.RenewCertificate(ctx); err != nil {
				c.config.Log.Warn(
					"renewing the certificate of this node failed; retrying",
					"error",
					err,
					"valid_until",
					cert.NotAfter,
					"next_try",
					every,
				)
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// RenewCertificate gets a new certificate with the current one, and uses it for new connections.
func (c *Client) RenewCertificate(ctx context.Context) error {
	c.renewing.Lock()
	defer c.renewing.Unlock()
	return c.renew(ctx)
}

func (c *Client) renew(ctx context.Context) error {
	key, csr, err := request()
	if err != nil {
		return err
	}
	resp, err := c.NodeServiceClient.Renew(ctx, connect.NewRequest(&pilasterv1.RenewRequest{Csr: csr}))
	if err != nil {
		return err
	}
	m, err := newMember(key, resp.Msg.Certificate, c.current.Load().ca.Raw)
	if err != nil {
		return err
	}
	if err := m.save(c.config.StateDir); err != nil {
		return err
	}
	c.use(m)
	return nil
}

// replace gets a new certificate after the orchestrator has refused the current one. It tries a renewal with the
// refused certificate, which the orchestrator may still accept for this call, and then the join token. It does nothing
// if another call has replaced the certificate meanwhile.
func (c *Client) replace(ctx context.Context, refused *identity) error {
	c.renewing.Lock()
	defer c.renewing.Unlock()
	if c.current.Load() != refused {
		return nil
	}
	err := c.renew(ctx)
	if err == nil || c.config.Token == "" || connect.CodeOf(err) == connect.CodeUnavailable {
		return err
	}
	token, second := ParseToken(c.config.Token)
	var m *member
	if second == nil {
		m, second = c.config.join(ctx, token)
	}
	if second != nil {
		return connect.NewError(
			connect.CodeOf(err),
			fmt.Errorf("%w\n  joining with the join token failed, too: %w", err, second),
		)
	}
	c.use(m)
	return nil
}

// renewal is an interceptor that replaces a refused certificate and repeats the call.
type renewal struct{ *Client }

func (r renewal) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		used := r.current.Load()
		resp, err := next(ctx, req)
		if connect.CodeOf(err) != connect.CodeUnauthenticated ||
			req.Spec().Procedure == pilasterv1connect.NodeServiceRenewProcedure {
			return resp, err
		}
		r.config.Log.Warn("the orchestrator refused this node's certificate; getting a new one", "error", err)
		if failed := r.replace(ctx, used); failed != nil {
			return nil, connect.NewError(
				connect.CodeOf(failed),
				fmt.Errorf("%w\n  getting a new certificate failed: %w", err, failed),
			)
		}
		return next(ctx, req)
	}
}

// WrapStreamingClient changes nothing: a node registers before each stream, and this call replaces a refused
// certificate.
func (r renewal) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (r renewal) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}
