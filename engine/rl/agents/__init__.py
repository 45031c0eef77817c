"""Run programs that call the model several times: sessions, their record, and the processes they run in."""
