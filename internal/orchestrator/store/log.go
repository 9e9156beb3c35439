package store

import (
	"context"
	"log/slog"
	"sync/atomic"

	"go.uber.org/zap/zapcore"
)

// slogCore passes etcd's errors to our logger and drops its other messages.
type slogCore struct {
	log   *slog.Logger
	quiet *atomic.Bool // when we stop etcd, it logs errors
}

func (c slogCore) Enabled(l zapcore.Level) bool { return l >= zapcore.ErrorLevel && !c.quiet.Load() }

func (c slogCore) With(fields []zapcore.Field) zapcore.Core {
	return slogCore{c.log.With(attributes(fields)...), c.quiet}
}

func (c slogCore) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return ce.AddCore(e, c)
	}
	return ce
}

func (c slogCore) Write(e zapcore.Entry, fields []zapcore.Field) error {
	level := slog.LevelWarn
	if e.Level > zapcore.ErrorLevel {
		level = slog.LevelError
		defer c.log.Error(
			"the embedded etcd failed, and this process ends; acknowledged changes are on disk: repair what etcd " +
				"reported, and restart",
		)
	}
	c.log.Log(context.Background(), level, "etcd: "+e.Message, attributes(fields)...)
	return nil
}

func (c slogCore) Sync() error { return nil }

func attributes(fields []zapcore.Field) []any {
	m := zapcore.NewMapObjectEncoder()
	for _, f := range fields {
		f.AddTo(m)
	}
	var args []any
	for k, v := range m.Fields {
		args = append(args, k, v)
	}
	return args
}
