package scenario

import "errors"

// Once builds a scenario over two nodes in dir, which must not exist, calls use with its pair, and removes everything.
// It measures nothing.
func Once(dir string, s Scenario, use func(Pair) error) (err error) {
	w, err := NewWire(dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	pair, err := s.Build(w)
	if err != nil {
		return err
	}
	return use(pair)
}
