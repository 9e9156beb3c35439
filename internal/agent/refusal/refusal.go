// Package refusal defines the kinds of errors that tell a caller of the agent what to do.
package refusal

import (
	"errors"
	"fmt"
)

// Kinds of refusals. Match with errors.Is.
var (
	ErrInvalid     = errors.New("invalid request")
	ErrNotFound    = errors.New("not found")
	ErrExists      = errors.New("already exists")
	ErrExhausted   = errors.New("full")
	ErrUnavailable = errors.New("try again later")
	ErrNever       = errors.New("not on this node")
	ErrCheck       = errors.New("check failed")
)

// refusal is an error of one of the kinds above whose text does not repeat the kind.
type refusal struct{ kind, err error }

func (r *refusal) Error() string   { return r.err.Error() }
func (r *refusal) Unwrap() []error { return []error{r.kind, r.err} }

// New returns a refusal of a kind.
func New(kind error, format string, args ...any) error {
	return &refusal{kind, fmt.Errorf(format, args...)}
}
